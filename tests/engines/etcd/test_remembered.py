"""Rows that a process remembers as it has written them decide only as long as no one else has written."""

import random

import pytest

import keyloft
from keyloft import ManualClock, admin, limits

_KEYS = [("k", number) for number in range(5)]
_VALUES = [1, {"some": "object"}, b"1" * (limits.ETCD_INLINE_BYTES + 1)]


async def test_sets_without_reading_leave_what_sets_after_reading_would(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes set, delete and let expire the same keys; what replaced rows had besides goes with them."""
    monkeypatch.setattr(limits, "ETCD_RIVAL_SECONDS", 0.0)  # they don't wait for each other, and remember all the same
    clock, rng = ManualClock(), random.Random(19)
    async with (
        keyloft.open(etcd_url, clock=clock, sweep_every=None) as one,
        keyloft.open(etcd_url, clock=clock, sweep_every=None) as other,
    ):
        model: dict[tuple[str, int], tuple[object, float | None]] = {}
        stores = [one] * 8 + [other]  # mostly one, so that it remembers
        for _ in range(80):
            clock.advance(1)
            kv, key = rng.choice(stores), rng.choice(_KEYS)
            if rng.random() < 0.2:
                await kv.delete(key)
                model.pop(key, None)
            else:
                value, expire_in = rng.choice(_VALUES), rng.choice([None, 5, 60])
                await kv.set(key, value, expire_in=expire_in)
                model[key] = value, None if expire_in is None else clock.now() / 1000 + expire_in
            alive = {key: value for key, (value, end) in model.items() if end is None or clock.now() / 1000 < end}
            for reader in (one, other):
                assert {entry.key: entry.value for entry in await reader.list(prefix=("k",))} == alive
        await one.sweep()
    assert (await admin.check(etcd_url)).findings == ()

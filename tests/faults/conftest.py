"""A seed per run for whatever is random here, shown when a test fails."""

import os
import random

import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Another run, another seed; `KEYLOFT_TEST_SEED` repeats one."""
    seed = os.environ.get("KEYLOFT_TEST_SEED") or str(int.from_bytes(os.urandom(4)))
    request.node.add_report_section("setup", "seed", f"to repeat: KEYLOFT_TEST_SEED={seed}")
    return random.Random(seed)

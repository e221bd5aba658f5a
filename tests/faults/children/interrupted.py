"""Is interrupted again and again: python -m tests.faults.children.interrupted PATH SEED ROUNDS

A timer raises KeyboardInterrupt at random moments of the main thread's calls, often several times in a row, while that
thread and two others add to pairs of counters through one synchronous store. Prints what the counters must hold:
«least most» of the main thread's, then the number of commits of each other thread.
"""

import random
import signal
import sys
import threading
from types import FrameType

import keyloft
from keyloft import SyncStore

_OTHERS = 2
_LONGEST_WAIT_SECONDS = 60


class _Interrupter:
    """Raises while a call of the store runs, one to three times in a row; never in the code of this module."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left = 0
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, _: int, frame: FrameType | None) -> None:
        if self._left and frame is not None and frame.f_code.co_filename != __file__:
            self._left -= 1
            raise KeyboardInterrupt

    def arm(self) -> None:
        self._left = self._rng.choice([1, 1, 2, 3])
        signal.setitimer(signal.ITIMER_REAL, 0.00001 + 0.002 * self._rng.random(), self._rng.choice([0.00002, 0.0001]))

    def disarm(self) -> None:
        self._left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)


def add(kv: SyncStore, *key: str | int) -> None:
    kv.atomic().sum((*key, "a"), 1).sum((*key, "b"), 1).commit()


def pair(kv: SyncStore, *key: str | int) -> int:
    [a, b] = kv.get_many([(*key, "a"), (*key, "b")])
    assert a.value == b.value, "a commit is there in part"
    return int(a.value or 0)


def main(path: str, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    interrupter = _Interrupter(rng)
    is_over = threading.Event()
    made = [0] * _OTHERS
    with keyloft.open_sync(path, durability="relaxed") as kv:

        def work(thread: int) -> None:
            while not is_over.is_set():
                add(kv, "other", thread)
                made[thread] += 1

        others = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(_OTHERS)]
        for other in others:
            other.start()
        least = most = 0
        for _ in range(rounds):
            interrupter.arm()
            try:
                while True:
                    if rng.random() < 0.6:
                        most += 1
                        add(kv, "main")
                        least += 1
                    else:
                        pair(kv, "main")
            except KeyboardInterrupt:
                interrupter.disarm()
        is_over.set()
        for other in others:
            other.join(_LONGEST_WAIT_SECONDS)
            assert not other.is_alive(), "a thread waits for an interrupted one"
        assert least <= pair(kv, "main") <= most
        assert [pair(kv, "other", thread) for thread in range(_OTHERS)] == made
        sys.stdout.write(f"{least} {most}\n{' '.join(map(str, made))}\n")
        sys.stdout.flush()
        sys.stdin.readline()  # the parent writes to the file meanwhile: nothing may be locked


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

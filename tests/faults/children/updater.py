"""Updates one entry from several threads: python -m tests.faults.children.updater PATH THREADS TIMES

Prints «ready», and begins at a line on its standard input. A thread that fails ends the process with its error.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import keyloft


def main(url: str, threads: int, times: int) -> None:
    with keyloft.open_sync(url) as kv:

        def count() -> None:
            for _ in range(times):
                kv.update(("counted",), lambda seen: {"times": seen["times"] + 1}, default={"times": 0})

        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        with ThreadPoolExecutor(threads) as workers:
            for done in [workers.submit(count) for _ in range(threads)]:
                done.result()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Writes through a synchronous store from several threads: python -m tests.faults.children.sync_writer PATH THREADS

Thread n stores ("log", n, number) and adds 1 to ("count", n) in one atomic, again and again. Each commit is printed
once it is acknowledged, as «thread number versionstamp».
"""

import sys
import threading

import keyloft


def main(path: str, threads: int) -> None:
    with keyloft.open_sync(path) as kv:

        def write(thread: int) -> None:
            number = int(kv.get(("count", thread)).value or 0)
            while True:
                number += 1
                done = kv.atomic().set(("log", thread, number), number).sum(("count", thread), 1).commit()
                sys.stdout.write(f"{thread} {number} {done.versionstamp}\n")
                sys.stdout.flush()

        writers = [threading.Thread(target=write, args=(thread,)) for thread in range(threads)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

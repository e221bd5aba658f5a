"""Writes, deletes, touches and lets expire at random: python -m tests.faults.children.churn URL SEED SECONDS

Keys are ("w", number). Prints `writing` once it has begun, and `done` at its end.
"""

import asyncio
import random
import sys

import keyloft

KEYS = 300


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(url: str, seed: int, seconds: float) -> None:
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()
    async with keyloft.open(url, durability="relaxed", sweep_every=0.2) as kv:
        say("writing")
        end = loop.time() + seconds
        while loop.time() < end:
            key = ("w", chance.randrange(KEYS))
            expire_in = chance.choice((None, 0.02, 0.1, 0.3))
            match chance.randrange(8):
                case 0 | 1 | 2:
                    await kv.set(key, chance.random(), expire_in=expire_in)
                case 3 | 4:
                    await kv.delete(key)
                case 5:
                    await kv.touch(key, expire_in=expire_in)
                case 6:
                    some = [("w", chance.randrange(KEYS)) for _ in range(20)]
                    await kv.set_many(dict.fromkeys(some, chance.random()), expire_in=expire_in)
                case 7:
                    await kv.delete_range(start=key, end=("w", key[1] + 5))
            if chance.random() < 0.05:
                await asyncio.sleep(chance.random() / 50)
    say("done")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))

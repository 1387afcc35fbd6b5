"""A worker for ``everdeck demo``: one user's bot that talks a lot and numbers what it says.

Run as ``python -m everdeck.cli.sample_user NAME``. The numbers let the demo show that not a line was lost.
"""

import itertools
import random
import sys
import time

_CHATS = ("family", "work", "climbing", "book club", "landlord", "grandma")
_DEEDS = (
    "answered {chat!r} in {ms} ms",
    "reminder for {chat!r} is due, sent",
    "\x1b[33mslow reply from upstream\x1b[0m, tried again after {ms} ms",
    "translated a message from {chat!r}",
    "\x1b[32mpayment confirmed\x1b[0m for {chat!r}",
    "nothing new in {chat!r}",
)


def main() -> None:
    """Talk until told to stop."""
    draw = random.Random(sys.argv[1])  # noqa: S311 - what a sample says is no secret
    for number in itertools.count(1):
        deed = draw.choice(_DEEDS).format(chat=draw.choice(_CHATS), ms=draw.randint(8, 900))
        print(f"#{number} {deed}", flush=True)
        time.sleep(draw.uniform(0.1, 0.5))  # noqa: TID251 - a sample that only talks has nothing to wait for


if __name__ == "__main__":
    main()

"""After: the same three functions on a deck. A restart of this program finds every bot again.

Run it twice: the second run shows the pids of the first. ``python examples/bots_after.py stop`` ends them.
"""

import sys

from everdeck import Deck, Restart

BOT = [sys.executable, "-c", "import signal; signal.pause()"]


def start(deck: Deck, user: str) -> None:
    deck.start(user, BOT, env={"BOT_USER": user}, restart=Restart("on-failure"))


def stop(deck: Deck, user: str) -> None:
    deck.stop(user)


def is_running(deck: Deck, user: str) -> bool:
    return any(worker.name == user and worker.state == "running" for worker in deck.list())


def main(words: list[str]) -> None:
    with Deck("bots-state") as deck:
        for user in ("alice", "bob"):
            if "stop" in words:
                stop(deck, user)
            else:
                start(deck, user)
        for worker in deck.list():
            print(worker.name, worker.state, worker.pid)


if __name__ == "__main__":
    main(sys.argv[1:])

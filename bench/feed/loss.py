"""What is lost when a bot dies: stock libraries against the durable ones, on one server, with one command.

    python bench/feed/loss.py [--quick] [--only aiogram|ptb]

300 updates from 300 chats. Each trial kills or terminates the bot in the middle, starts it again, and waits until it
has nothing left to do. *Lost*: no handler ever finished it. *Twice*: a handler finished it more than once; with
at-least-once at most what was in flight at the kill (the rows marked as running in the inbox).
*Twice with transaction*: rows written twice by handlers that use ``item.transaction()``.

Exits with 1 if a durable bot lost anything, or repeated more than was in flight, or repeated a transaction.
"""

import argparse
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from everdeck.testing.telegram import TelegramServer, text_update
from support.tg_bots import BotProcess

COUNT = 300


@dataclass(frozen=True)
class Scenario:
    """How updates come, how long a handler takes, and how the bot ends."""

    name: str
    library: str
    sleep_ms: int
    stream: bool = False
    terminate: bool = False
    options: tuple[str, ...] = ()


SCENARIOS = [
    Scenario("burst, kill -9", "aiogram", 50),
    Scenario("stream, kill -9", "aiogram", 50, stream=True),
    Scenario("burst, SIGTERM, 1 s handlers", "aiogram", 1000, terminate=True),
    Scenario("burst, kill -9", "ptb", 50),
    Scenario("stream, kill -9", "ptb", 50, stream=True),
    Scenario("burst, kill -9, 32 at once", "ptb", 50, options=("--concurrency", "32")),
    Scenario("burst, SIGTERM, SIGKILL after 10 s, 0.5 s handlers", "ptb", 500, terminate=True),
]


@dataclass
class Outcome:
    """What one trial showed."""

    lost: int
    twice: int
    in_flight: int = 0


@dataclass
class Row:
    """A line of the table."""

    stock: list[Outcome] = field(default_factory=list)
    durable: list[Outcome] = field(default_factory=list)
    transaction: list[Outcome] = field(default_factory=list)


def trial(scenario: Scenario, kind: str, chance: random.Random) -> Outcome:
    """One bot, one end in the middle, one restart."""
    with tempfile.TemporaryDirectory() as name, TelegramServer() as server:
        directory = Path(name)
        ids: list[int] = []
        source = threading.Thread(target=_come, args=(server, ids, 0.01 if scenario.stream else 0.0))
        options = [*scenario.options, *(["--transaction"] if kind == "transaction" else [])]
        bot = BotProcess(scenario.library, server, directory, *options, durable=kind != "stock")
        plain = list(bot.command)
        bot.command += ["--sleep-ms", str(scenario.sleep_ms)]
        with bot:
            server.wait_for(lambda server: bool(server.polls()), timeout=120)
            source.start()
            if scenario.terminate:
                bot.wait_for(lambda handled: len(handled.began) >= 3)
                bot.terminate(10)
            else:
                wanted = chance.randrange(3, 200 if scenario.library == "aiogram" else 40)
                bot.wait_for(lambda handled: len(handled.ended) >= wanted)
                bot.kill()
            in_flight = _in_flight(directory / "bot.db") if kind != "stock" else 0
            source.join()
            # The second life only has to show what there is left to do, so its handlers are quick.
            bot.command = [*plain, "--sleep-ms", "1"]
            bot.start()
            counts = _after_the_last(bot, server, kind)
    lost = sum(not counts[update_id] for update_id in ids)
    return Outcome(lost, sum(count - 1 for count in counts.values() if count > 1), in_flight)


def _come(server: TelegramServer, ids: list[int], pause: float) -> None:
    updates = [text_update("work", chat_id=number) for number in range(1, COUNT + 1)]
    if not pause:
        ids.extend(server.push(*updates))
    for update in updates if pause else []:
        ids.extend(server.push(update))
        time.sleep(pause)


def _in_flight(database: Path) -> int:
    (count,) = _read(database, "SELECT count(*) FROM everdeck_item WHERE state = 1")[0]
    return int(count)


def _after_the_last(bot: BotProcess, server: TelegramServer, kind: str) -> Counter[int]:
    """How often each was done, once nothing has moved for two seconds and the server has nothing to give."""
    polls = len(server.polls())
    server.wait_for(lambda server: len(server.polls()) > polls, timeout=120)
    last, since = None, time.monotonic()
    while True:
        counts = _done(bot, kind)
        if counts != last or server.pending():
            last, since = counts, time.monotonic()
        if sum(map(bool, counts.values())) == COUNT or time.monotonic() - since > 2:
            return counts
        time.sleep(0.05)


def _done(bot: BotProcess, kind: str) -> Counter[int]:
    if kind != "transaction":
        return bot.journal().ended
    return Counter(int(update_id) for (update_id,) in _read(bot.directory / "bot.db", "SELECT update_id FROM handled"))


def _read(database: Path, query: str) -> list[tuple[int]]:
    with sqlite3.connect(database) as db:
        found: list[tuple[int]] = db.execute(query).fetchall()
    db.close()
    return found


def main() -> int:
    """Print the table; 1 if a durable bot did what it must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one trial of each instead of five")
    parser.add_argument("--only", choices=["aiogram", "ptb"])
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance, trials = random.Random(given.seed), given.trials or (1 if given.quick else 5)
    print(
        f"| bot | how it ended | stock: lost of {COUNT} | durable: lost | durable: twice (in flight) "
        "| twice with transaction |"
    )
    print("|---|---|---|---|---|---|")
    failed = False
    for scenario in SCENARIOS:
        if given.only not in {None, scenario.library}:
            continue
        row = Row()
        for _ in range(trials):
            row.stock.append(trial(scenario, "stock", chance))
            row.durable.append(trial(scenario, "durable", chance))
            row.transaction.append(trial(scenario, "transaction", chance))
        failed |= any(one.lost or one.twice > one.in_flight for one in row.durable)
        failed |= any(one.lost or one.twice for one in row.transaction)
        cells = [
            ", ".join(str(one.lost) for one in row.stock),
            ", ".join(str(one.lost) for one in (*row.durable, *row.transaction)),
            ", ".join(f"{one.twice} ({one.in_flight})" for one in row.durable),
            ", ".join(str(one.twice) for one in row.transaction),
        ]
        print(f"| {scenario.library} | {scenario.name} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

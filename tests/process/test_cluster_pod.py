"""The deck inside a pod, without a pod: what it does with the id of its start, and with what an earlier pod left."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everdeck.cluster.fence import DEADLINE_FD_ENV, REPORT_FD_ENV, Deadline
from everdeck.cluster.volume import RESTART, SECRET_PREFIX, SPEC_FILE
from everdeck.feed import Inbox, Record
from everdeck.feed.claims import Claims
from everdeck.kernel.identity import boottime
from everdeck.messages import Incoming, encoded
from support.repo_processes import end_all_under
from support.waiting import until

SAYS = "echo the secret is $KEY; exec sleep 1000"
READER = Path(__file__).parents[1] / "support" / "sat_reader.py"


@contextmanager
def pod(place: Path, start: str, *, loses_power: bool = False) -> Iterator[dict[str, Any]]:
    """It runs as the fence starts it; yields the report that its worker runs. Then it ends, politely or not."""
    deadline = Deadline.make()
    deadline.at = boottime() + 1000
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {
        **os.environ,
        "EVERDECK_VOLUME": str(place / "volume"),
        "EVERDECK_GIVEN": str(place / "given"),
        "EVERDECK_WORKER_NAME": "alice",
        "EVERDECK_START": start,
        DEADLINE_FD_ENV: str(deadline.fd),
        REPORT_FD_ENV: str(theirs.fileno()),
    }
    words = [sys.executable, "-P", "-m", "everdeck.cluster.pod", "--", "nothing"]
    with ours, subprocess.Popen(words, env=environment, pass_fds=(deadline.fd, theirs.fileno())) as process:
        theirs.close()
        ours.settimeout(60)
        try:
            report: dict[str, Any] = {"status": {"state": "starting"}}
            while report["status"]["state"] != "running":
                report = json.loads(ours.recv(1 << 20))
            yield report
            if loses_power:
                process.kill()
                end_all_under(place)
            else:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(deadline.fd)


class Given:
    """What a pod finds: its volume, its Secret; and what its worker says that it was given."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._secret = place / "given" / f"{SECRET_PREFIX}KEY"
        self._wanted: list[str] = []
        (place / "volume").mkdir()
        (place / "given").mkdir()
        self.specify({"command": ["sh", "-c", SAYS], "secrets": {"KEY": {"env": True}}})
        self.give("old")

    def specify(self, spec: dict[str, Any]) -> None:
        """Write the spec."""
        (self.place / "given" / SPEC_FILE).write_text(json.dumps(spec))

    def give(self, secret: str) -> None:
        """Write the secret anew."""
        self._secret.write_text(secret)

    def said(self) -> list[str]:
        """By each copy of the worker that ever ran."""
        log = self.place / "volume" / "deck" / "workers" / "alice" / "log" / "current"
        return [line.split()[-1] for line in log.read_text().splitlines() if line.startswith("the secret is")]

    def seen(self, report: dict[str, Any]) -> tuple[str, int]:
        """One more copy has run, with the secret of now; how it was told and counted."""
        self._wanted.append(self._secret.read_text())
        until(lambda: self.said() == self._wanted, "it says what it was given")
        return report["events"][-1]["kind"], report["status"]["restarts"]


@pytest.fixture
def given(tmp_path: Path) -> Iterator[Given]:
    """Nothing of it runs afterwards."""
    yield Given(tmp_path)
    end_all_under(tmp_path)


def test_a_restart_is_counted_and_what_was_given_meanwhile_counts(given: Given) -> None:
    """The next pod of a restart tells it as one; a secret that was written anew is what its worker gets."""
    with pod(given.place, "a1") as report:
        assert given.seen(report) == ("started", 0)
        assert report["start"] == "a1"
    with pod(given.place, f"{RESTART}b2") as report:
        assert given.seen(report) == ("restarted", 1)
    given.give("new")
    with pod(given.place, f"{RESTART}c3") as report:
        assert given.seen(report) == ("started", 1)
    with pod(given.place, f"{RESTART}d4") as report:
        assert given.seen(report) == ("restarted", 2)


def test_a_restart_is_done_once_though_its_pod_is_put_elsewhere(given: Given) -> None:
    """The next pod of the same start runs one copy, and tells what it tells of a worker that was never restarted."""
    with pod(given.place, "a1", loses_power=True) as report:
        assert given.seen(report) == ("started", 0)
    with pod(given.place, "a1") as report:
        told, counted = given.seen(report)
    with pod(given.place, f"{RESTART}b2", loses_power=True) as report:
        assert given.seen(report) == ("restarted", counted + 1)
    with pod(given.place, f"{RESTART}b2") as report:
        assert given.seen(report) == (told, 2 * counted + 1)
    given.give("new")
    for _ in range(2):
        with pod(given.place, f"{RESTART}c3") as report:
            assert given.seen(report) == ("started", 2 * counted + 1)


def test_what_a_reader_in_an_earlier_pod_held_is_free_at_once(given: Given) -> None:
    """On the same machine its lease would last for another minute."""
    satellite = {"kind": "cron", "options": {"expression": "0 0 29 2 *"}}
    given.specify({"satellite": satellite})
    feed = given.place / "volume" / "deck" / "workers" / "alice" / "data" / "feed.db"
    with pod(given.place, "a1"):
        until(feed.exists, "its feed")
    asyncio.run(_stored(feed, "hello"))
    words = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    command = [*words, sys.executable, str(READER), str(feed), "stop-after-claim"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().startswith("took hello")
        reader.kill()
    with Claims(feed) as claims:
        assert claims.take() == [], "its lease has ended already: this test shows nothing"

    with pod(given.place, "b2"), Claims(feed) as claims:
        assert [json.loads(claim.payload)["text"] for claim in claims.take()] == ["hello"]


async def _stored(feed: Path, text: str) -> None:
    async with Inbox(feed) as inbox:
        stream = inbox.stream("test:1")
        await stream.begin()
        await stream.store([Record(text, encoded(Incoming(id=text, channel="test", conversation="1", text=text)), "1")])

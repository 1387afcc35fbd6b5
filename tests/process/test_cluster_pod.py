"""The deck inside a pod, without a pod: what it does with the id of its start."""

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
from everdeck.cluster.pod import RESTART, SECRET_PREFIX, SPEC_FILE
from everdeck.kernel.identity import boottime
from support.repo_processes import end_all_under
from support.waiting import until

SAYS = "echo the secret is $KEY; exec sleep 1000"


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
        spec = {"command": ["sh", "-c", SAYS], "secrets": {"KEY": {"env": True}}}
        (place / "given" / SPEC_FILE).write_text(json.dumps(spec))
        self.give("old")

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

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

from everdeck.cluster.fence import DEADLINE_FD_ENV, REPORT_FD_ENV, Deadline
from everdeck.cluster.pod import RESTART, SECRET_PREFIX, SPEC_FILE
from everdeck.kernel.identity import boottime
from support.repo_processes import end_all_under
from support.waiting import until

SAYS = "echo the secret is $KEY; exec sleep 1000"


@contextmanager
def pod(place: Path, start: str) -> Iterator[dict[str, Any]]:
    """It runs as the fence starts it; yields the report that its worker runs."""
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
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(deadline.fd)


def test_a_restart_is_counted_and_what_was_given_meanwhile_counts(tmp_path: Path) -> None:
    """The next pod of a restart tells it as one; a secret that was written anew is what its worker gets."""
    given = tmp_path / "given"
    given.mkdir()
    (tmp_path / "volume").mkdir()
    spec = {"command": ["sh", "-c", SAYS], "secrets": {"KEY": {"env": True}}}
    (given / SPEC_FILE).write_text(json.dumps(spec))
    (given / f"{SECRET_PREFIX}KEY").write_text("old")
    log = tmp_path / "volume" / "deck" / "workers" / "alice" / "log" / "current"
    wanted: list[str] = []

    def said() -> list[str]:
        return [line.split()[-1] for line in log.read_text().splitlines() if line.startswith("the secret is")]

    def seen(report: dict[str, Any], secret: str) -> tuple[str, int]:
        wanted.append(secret)
        until(lambda: said() == wanted, "it says what it was given")
        return report["events"][-1]["kind"], report["status"]["restarts"]

    try:
        with pod(tmp_path, "a1") as report:
            assert seen(report, "old") == ("started", 0)
            assert report["start"] == "a1"
        for number in (1, 2):  # the same id again: the cluster has put the pod elsewhere
            with pod(tmp_path, f"{RESTART}b2") as report:
                assert seen(report, "old") == ("restarted", number)
        (given / f"{SECRET_PREFIX}KEY").write_text("new")
        with pod(tmp_path, f"{RESTART}c3") as report:
            assert seen(report, "new") == ("started", 2)
        with pod(tmp_path, f"{RESTART}d4") as report:
            assert seen(report, "new") == ("restarted", 3)
    finally:
        end_all_under(tmp_path)

"""The verbs of the deck on a real cluster."""

import json
import time

import pytest

from everdeck import Deck, Log, Restart, Secret, SpecChanged, UnknownWorker
from everdeck.errors import SpawnFailed, Unsupported, WorkerFailed
from support.cluster_machines import Cluster, until

TALKER = ["python3", "-uc", "import time\nfor n in range(10**9): print('line', n); time.sleep(0.2)"]


def test_a_worker_is_started_seen_stopped_and_removed(deck: Deck, cluster: Cluster, namespace: str) -> None:
    """The same verbs and states as on one box; its volume outlives a stop, and a removal without data."""
    status = deck.start("alice", TALKER, env={"GREETING": "hello"}, labels={"team": "blue"})
    assert status.state == "running"
    assert status.labels == {"team": "blue"}
    assert [one.name for one in deck.list()] == ["alice"]
    assert deck.start("alice", TALKER, env={"GREETING": "hello"}, labels={"team": "blue"}).state == "running"
    with pytest.raises(SpecChanged) as refused:
        deck.start("alice", ["python3", "-c", "pass"])
    assert "command" in refused.value.fields

    until(lambda: any("line" in line for line in deck.logs("alice", lines=5)), "its log")
    assert deck.stop("alice").state == "stopped"
    assert any("line" in line for line in deck.logs("alice", lines=50)), "the log of a stopped worker"
    assert deck.start("alice").state == "running"
    restarted = deck.restart("alice")
    assert restarted.state == "running"

    deck.remove("alice")
    assert deck.list() == []
    with pytest.raises(UnknownWorker):
        deck.status("alice")
    assert cluster.get("pvc", "data-alice-0", namespace=namespace)["status"]["phase"] == "Bound"


def test_the_log_holds_what_is_in_archives_too(deck: Deck, cluster: Cluster, namespace: str) -> None:
    """Of a worker that runs and of one that is stopped: every line once, in order, out of many files."""
    program = "import time\nfor n in range(4000): print(f'line {n:05}')\nprint('all', flush=True); time.sleep(9999)"
    deck.start("alice", ["python3", "-c", program], log=Log(max_bytes=8192, keep=50))
    until(lambda: deck.logs("alice", lines=1) == ["all"], "its last line")
    folder = cluster.volume(namespace, "alice") / "deck" / "workers" / "alice" / "log"
    assert len(list(folder.iterdir())) > 3, "nothing was archived"
    expected = [f"line {number:05}" for number in range(4000)]

    def told() -> list[str]:
        return [line for line in deck.logs("alice", lines=None) if line.startswith("line")]

    assert told() == expected
    assert deck.logs("alice", lines=None, grep="00003") == ["line 00003"]
    deck.stop("alice")
    assert told() == expected


def test_names_that_are_no_dns_labels_are_workers_too(deck: Deck) -> None:
    """Mails and numbers, in any case."""
    for name in ("Bob@example.org:2", "42", "UPPER_case+x.y"):
        assert deck.start(name, TALKER).name == name
    assert {one.name for one in deck.list()} == {"Bob@example.org:2", "42", "UPPER_case+x.y"}
    deck.stop_all()


def test_events_are_durable_and_in_order(deck: Deck, namespace: str) -> None:
    """Ids grow by one; another deck reads the same."""
    deck.start("alice", TALKER)
    deck.stop("alice")
    until(lambda: [event for event in deck.events() if event.kind == "stopped"], "the end is told")

    events = deck.events()
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert {"started", "stopping", "stopped"} <= {event.kind for event in events}
    with Deck(f"kubernetes:{namespace}") as another:
        assert another.events() == events
        assert another.events(after=2) == events[2:]


def test_crashes_back_off_and_trip_the_breaker(deck: Deck) -> None:
    """Counted in the pod, told in the Lease; a reset lets it try again."""
    policy = Restart("on-failure", max_crashes=1, backoff_seconds=0.1, backoff_cap_seconds=0.1)
    deck.start("bad", ["python3", "-c", "raise SystemExit(7)"], restart=policy)
    until(lambda: deck.status("bad").state == "failed", "the breaker trips")

    assert deck.status("bad").exit.code == 7  # type: ignore[union-attr]
    with pytest.raises(WorkerFailed):
        deck.start("bad")
    deck.reset("bad")
    until(lambda: deck.status("bad").state == "failed", "it failed again")
    until(lambda: [event.kind for event in deck.events(worker="bad")].count("failed") == 2, "both are told")


def test_secrets_reach_the_program_and_nobody_else(deck: Deck, cluster: Cluster, namespace: str) -> None:
    """As a file; the StatefulSet does not show them."""
    read = "open(os.environ['CREDENTIALS_DIRECTORY'] + '/TOKEN').read()"
    program = f"import os, time\nprint({read}[::-1], flush=True)\ntime.sleep(999)"
    deck.start("alice", ["python3", "-c", program], secrets={"TOKEN": Secret("s3cr3t-value")})
    until(lambda: "eulav-t3rc3s" in deck.logs("alice"), "the program has read it")

    shown = [cluster.get(kind, namespace=namespace) for kind in ("statefulset", "pod", "lease")]
    assert all(one["items"] for one in shown)
    assert "s3cr3t" not in json.dumps(shown)
    assert deck.spec("alice").secrets["TOKEN"].value is None


def test_what_a_cluster_cannot_do_is_said(deck: Deck) -> None:
    """Beforehand, and as an error."""
    with pytest.raises(Unsupported):
        deck.adopt("alice", 1)
    assert "adopt" in deck.abilities().unsupported


def test_an_image_that_is_not_there_is_named(deck: Deck) -> None:
    """Instead of waiting for ever."""
    begin = time.monotonic()
    with pytest.raises(SpawnFailed, match="Image"):
        deck.start("alice", TALKER, labels={"everdeck.dev/image": "localhost/nowhere:1"})
    assert time.monotonic() - begin < 100

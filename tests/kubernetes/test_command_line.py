"""``everdeck --state kubernetes:NAMESPACE``: the same words, and ``everdeck move``."""

import json
import os
from pathlib import Path

import pytest

from everdeck import Deck
from support.cluster_beats import COMMAND, Beats, beats_file, overlaps
from support.cluster_machines import IMAGE, Cluster, everdeck, until


def test_the_same_words_as_on_one_box(namespace: str, cluster: Cluster, tmp_path: Path) -> None:
    """start, ps, inspect, logs, events, stop, rm; a file is applied, and again, and changed."""
    state = f"kubernetes:{namespace}"

    def typed(*words: str, code: int = 0) -> str:
        return everdeck("--state", state, *words, cwd=tmp_path, code=code)

    assert "no workers yet" in typed("ps")
    program = "import os, time\nprint('in', os.getcwd(), flush=True)\ntime.sleep(999)"
    assert typed("start", "alice", "-e", "A=1", "--", "python3", "-c", program).startswith("alice running")
    shown = json.loads(typed("ps", "--json"))
    assert (shown["supervised"], shown["owner_pid"]) == (True, None)
    assert [worker["state"] for worker in shown["workers"]] == ["running"]
    until(lambda: "/everdeck/deck/workers/alice/data" in typed("logs", "alice"), "it says where it runs")
    assert str(tmp_path) not in typed("inspect", "alice", "--json")
    assert "python3" in typed("inspect", "alice")
    assert "cluster's" in typed("members")
    assert "cannot be taken over by a cluster" in typed("adopt", "bob", str(os.getpid()), code=1)
    assert typed("stop", "alice") == "alice stopped\n"
    kinds = [json.loads(line)["kind"] for line in typed("events", "--json").splitlines()]
    assert kinds[0] == "started"
    assert "no worker 'alicia'" in typed("stop", "alicia", code=1)

    file = tmp_path / "everdeck.toml"
    file.write_text('[worker.bob]\ncommand = ["sleep", "1000"]\n[worker.carol]\ncommand = ["sleep", "1000"]\n')
    assert "2 to add" in typed("apply", str(file))
    assert "2 unchanged" in typed("apply", str(file))
    file.write_text('[worker.bob]\ncommand = ["sleep", "1001"]\n')
    planned = typed("apply", "--dry-run", str(file))
    assert "~ bob (command)" in planned
    assert "- carol" in planned
    typed("apply", str(file))
    assert {one["name"] for one in json.loads(typed("ps", "--json"))["workers"]} == {"alice", "bob"}

    typed("rm", "--data", "alice")
    claims = [one["metadata"]["name"] for one in cluster.get("pvc", namespace=namespace)["items"]]
    assert "data-alice-0" not in claims
    assert "data-carol-0" in claims, "a removal without --data keeps the volume"


POINTS = ("move.stopped", "move.copied", "move.known-there", "move.forgotten-here")


@pytest.mark.parametrize("point", ["", *POINTS])
def test_a_worker_moves_and_never_runs_in_both_places(
    namespace: str, cluster: Cluster, deck: Deck, tmp_path: Path, point: str
) -> None:
    """Killed at each step and typed again: its files and its secret are there, and its beats never overlap."""
    state = tmp_path / "state"
    token = tmp_path / "token"
    token.write_text("s3cr3t")
    secret = "open(os.environ['CREDENTIALS_DIRECTORY'] + '/TOKEN').read()"
    program = f"import os\nprint('secret', {secret}[::-1], flush=True)\n{COMMAND[-1]}"
    with Deck(state) as here:
        here.start("alice", ["python3", "-c", program], secrets={"TOKEN": token.read_text()}, cwd=str(tmp_path))
        until(Beats(beats_file(state.parent, "alice", "state")).stretches, "it beats here")
        (state / "workers" / "alice" / "data" / "folder").mkdir()
        (state / "workers" / "alice" / "data" / "folder" / "note").write_text("kept")
        words = ("--state", str(state), "move", "--to", f"kubernetes:{namespace}", "alice")
        if point:
            everdeck(*words, cwd=tmp_path, code=-9, EVERDECK_CRASH_AT=point)
        said = everdeck(*words, cwd=tmp_path)
        assert "alice running in kubernetes:" in said
        assert here.list() == []

    volume = cluster.volume(namespace, "alice")
    beats = Beats(beats_file(volume, "alice"))
    until(lambda: beats.lives >= 2, "it has its beats of before, and goes on")
    until(lambda: beats.newest.last - beats.newest.first > 1, "it beats there")
    assert not overlaps(beats.stretches())
    assert (volume / "deck" / "workers" / "alice" / "data" / "folder" / "note").read_text() == "kept"
    until(lambda: deck.logs("alice", lines=200).count("secret t3rc3s") == 2, "its log came along, and its secret")
    deck.remove("alice")


def test_what_a_pod_cannot_give_is_refused_before_anything_stops(namespace: str, tmp_path: Path) -> None:
    """A worker with an account of this machine stays where it is, running."""
    state = tmp_path / "state"
    with Deck(state) as here:
        here.start("alice", ["sleep", "1000"], user="root")
        said = everdeck("--state", str(state), "move", "--to", f"kubernetes:{namespace}", "alice", cwd=tmp_path, code=1)
        assert "user" in said
        assert here.status("alice").state == "running"
        here.remove("alice")


def test_the_image_of_a_file_is_used(namespace: str, cluster: Cluster, tmp_path: Path) -> None:
    """``[kubernetes]`` of the applied file says which image, where the namespace does not."""
    cluster.do("kubectl", "delete", "configmap", "everdeck", "-n", namespace)
    file = tmp_path / "everdeck.toml"
    worker = '[worker.bob]\ncommand = ["sleep", "1000"]\n'
    file.write_text(worker)
    assert "image" in everdeck("--state", f"kubernetes:{namespace}", "apply", cwd=tmp_path, code=1)
    file.write_text(f'[kubernetes]\nimage = "{IMAGE}"\nimage_pull_policy = "Never"\n{worker}')
    assert "done" in everdeck("--state", f"kubernetes:{namespace}", "apply", cwd=tmp_path)

"""``everdeck up`` as PID 1 of a real container: the recipe of the docs, run by runc."""

from collections.abc import Iterator

import pytest

from support.containers import Engine, delegated_cgroup, engine
from support.waiting import until

# Leaves an orphan behind that ends at once: a zombie until PID 1 reaps it.
ORPHAN = "(sleep 0.2 &) ; exec sleep 1000"
# Writes down that it was asked politely.
POLITE = "trap 'echo asked > asked; exit 0' TERM; echo ready > ready; while :; do sleep 0.1; done"


@pytest.fixture
def bots() -> Iterator[Engine]:
    """A read-only root and a volume."""
    with engine() as made:
        yield made


@pytest.mark.parametrize("proc_sys", [True, False], ids=["proc-sys", "no-proc-sys"])
def test_the_recipe_reaps_stops_politely_and_comes_back(bots: Engine, proc_sys: bool) -> None:
    """As an ordinary account, with a read-only root, and whether or not there is a ``/proc/sys``."""
    first = bots.run(proc_sys=proc_sys)
    until(lambda: "this is PID 1: SIGTERM stops every worker" in first.said, "it did not say what its end means")
    first.runs(*bots.recipe.health)
    assert first.workers()["alice"]["state"] == "running"
    first.types("start", "polite", "--cwd", f"{bots.recipe.volume}/workers/polite/data", "--", "sh", "-c", POLITE)
    first.types("start", "parent", "--", "sh", "-c", ORPHAN)
    data = first.state / "workers" / "polite" / "data"
    until((data / "ready").exists, "the polite one did not begin")
    until(lambda: not first.zombies(), "an orphan stays a zombie")

    assert first.stop() == 0, first.said
    assert (data / "asked").read_text() == "asked\n"

    second = bots.run(proc_sys=proc_sys)
    states = {name: one["state"] for name, one in second.workers().items()}
    assert states == {"alice": "running", "polite": "running", "parent": "running"}
    assert second.stop() == 0, second.said


def test_with_a_delegated_cgroup_nothing_gets_away(bots: Engine) -> None:
    """Workers of root are born in cgroups of their own, and a reload in place keeps PID 1 and its workers."""
    with delegated_cgroup() as own:
        container = bots.run(root=True, cgroup=own)
        before = container.workers()["alice"]
        assert before["containment"] == "cgroup", container.said
        container.types("reload")
        assert container.workers()["alice"]["pid"] == before["pid"]
        assert container.stop() == 0, container.said
        assert "populated 0" in (own / "cgroup.events").read_text()


def test_the_exit_code_says_why_it_did_not_run(bots: Engine) -> None:
    """2 for a wrong command line, 1 for a place that cannot be written: an engine's restart policy reads it."""
    wrong = bots.begin(command=[*bots.recipe.command, "--no-such-option"])
    assert wrong.process.wait(60) == 2, wrong.said
    wrong.end()
    readonly = bots.begin(command=["everdeck", "up", "--state", "/srv/state", "--no-http"])
    assert readonly.process.wait(60) == 1, readonly.said
    assert "Read-only file system" in readonly.said

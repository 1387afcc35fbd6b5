"""What was answered is on the disk, and no event id means two things, though a power cut takes back commits."""

import contextlib
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everdeck import Deck, config, disk
from everdeck.errors import ConfigRefused, RegistryError, SpecError
from everdeck.model import DurabilityMode, EventKind
from everdeck.registry import Registry
from support import deck_owner, power_trace
from support.deck_owner import Owner

FOREVER = ["sleep", "1000"]


def test_an_event_id_that_was_told_is_never_given_again_after_a_power_cut(tmp_path: Path) -> None:
    """The commits of the last moments are gone; what comes next has numbers that nobody has seen."""
    path, cut = tmp_path / "deck.db", tmp_path / "cut" / "deck.db"
    cut.parent.mkdir()
    registry = Registry.open(path, "boot-1")
    registry.append_event(0.0, None, EventKind.FEED, {"n": 0})
    registry.sync()
    for file in path.parent.glob("deck.db*"):  # what the disk has: nothing after this moment was flushed
        shutil.copy(file, cut.with_name(file.name))
    told = [registry.append_event(0.0, None, EventKind.FEED, {"n": n}).id for n in range(1, 50)]
    registry.close()

    after = Registry.open(cut, "boot-2")
    try:
        assert after.events()[-1].id == 1, "the copy is of before: the cut took the others back"
        fresh = after.append_event(0.0, None, EventKind.FEED, {"n": "new"})
        assert fresh.id > max(told)
        assert [event.id for event in after.events(after=max(told))] == [fresh.id], "a reader that was there sees it"
    finally:
        after.close()


def test_ids_grow_by_one_across_owners_of_one_boot_and_over_the_end_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reserved block costs no gap: only a boot, or a lost registry, begins a new one."""
    monkeypatch.setattr("everdeck.registry.store._IDS_IN_A_BLOCK", 3)
    seen = []
    for _ in range(4):
        registry = Registry.open(tmp_path / "deck.db", "boot-1")
        seen += [registry.append_event(0.0, None, EventKind.FEED, {}).id for _ in range(5)]
        registry.close()
    assert seen == list(range(1, 21))


def test_ids_go_on_when_the_registry_is_deleted(tmp_path: Path) -> None:
    """A reader that follows by id must not miss what a new registry tells."""
    state = tmp_path / "state"
    with Deck(state) as deck:
        last = deck.events()[-1].id
    for file in state.glob("deck.db*"):
        if not file.name.endswith("-ids"):
            file.unlink()
    with Deck(state) as deck:
        assert deck.events()[0].id > last


def test_a_replaced_file_is_whole_before_it_has_the_name(tmp_path: Path) -> None:
    """Written, synced, renamed, and the directory synced, in this order, as the kernel saw it."""
    _needs_strace()
    code = (
        "from pathlib import Path; from everdeck.disk import replace_file; import sys;"
        "replace_file(Path(sys.argv[1]), b'content'); print('replaced', flush=True)"
    )
    target = tmp_path / "state" / "secret"
    target.parent.mkdir()
    trace = tmp_path / "trace"
    subprocess.run(power_trace.command(trace, sys.executable, "-c", code, str(target)), check=True, timeout=60)
    assert target.read_bytes() == b"content"
    assert target.stat().st_mode & 0o777 == 0o600
    told = list(power_trace.walk(trace, target.parent))
    syncs = [Path(one.path).name for one in told if isinstance(one, power_trace.Sync)]
    assert syncs == [".secret.new", "state"]
    said = next(one for one in told if isinstance(one, power_trace.Said))
    assert not said.unsynced - {str(target.parent / ".secret.new")}


def test_a_replaced_file_stays_as_it_was_when_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half file, and nothing left beside it."""
    target = tmp_path / "secret"
    target.write_bytes(b"old")

    def refuse(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fdatasync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        disk.replace_file(target, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    assert target.read_bytes() == b"old"


def test_a_file_system_that_gave_up_is_no_file_without_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its disk has failed ext4 refuses every sync with EROFS: nothing may be answered as safe then."""

    def refuse(_fd: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.fdatasync", refuse)
    with pytest.raises(OSError, match="Read-only"):
        disk.replace_file(tmp_path / "secret", b"new")


def test_what_a_sync_refused_is_written_anew_before_anything_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a page that it could not write once; the next sync of it succeeds and proves nothing."""
    state, sync, refusals = tmp_path / "state", os.fdatasync, [0]

    def refuse(fd: int) -> None:
        if refusals[0] and Path(f"/proc/self/fd/{fd}").readlink().name == "deck.db-wal":
            refusals[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr("os.fdatasync", refuse)
    with Deck(state) as deck:
        deck.start("before", ["sleep", "1000"])
        refusals[0] = 1
        with pytest.raises(RegistryError, match="Input/output"):
            deck.start("refused", ["sleep", "1000"])
        deck.start("after", ["sleep", "1000"])
        alone = tmp_path / "alone"
        alone.mkdir()
        shutil.copy(state / "deck.db", alone)  # without the log, whose content may be anything
        with contextlib.closing(sqlite3.connect(alone / "deck.db")) as database:
            known = {name for (name,) in database.execute("SELECT name FROM workers")}
        assert {"before", "refused"} <= known, "what was recorded up to the failure has to be written once more"
        deck.stop_all()


@pytest.mark.parametrize("durability", ["power", "process"])
def test_an_answer_comes_after_its_sync_and_nothing_waits_longer_than_a_second(durability: str, tmp_path: Path) -> None:
    """``power``: nothing of ours is unsynced when the owner answers. ``process``: it may be, for less than a second."""
    _needs_strace()
    state, trace = tmp_path / "state", tmp_path / "trace"
    words = power_trace.command(trace, sys.executable, deck_owner.__file__, str(state), durability)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        owner = Owner(run)
        try:
            assert owner.answer() == "open"
            for number in range(3):
                owner.ask("start", f"w{number}", FOREVER, secrets={"KEY": f"value {number}"})
            owner.ask("restart", "w0")
            owner.ask("stop", "w1")
            owner.ask("reset", "w2")
            owner.ask("remove", "w1")
            owner.ask("stop_all")
        finally:
            run.communicate(timeout=60)
    told = list(power_trace.walk(trace, state))
    answers = [one for one in told if isinstance(one, power_trace.Said) and '\\"answer\\"' in one.text][1:]
    assert len(answers) == 8
    unsynced = [(one.text[:60], _ours(one.unsynced)) for one in answers if _ours(one.unsynced)]
    if durability == "power":
        assert not unsynced
    else:  # the same checker finds what is missing when nothing was synced first
        assert unsynced
    syncs = [one for one in told if isinstance(one, power_trace.Sync) and one.path.endswith("/deck.db-wal")]
    waits = [one.at - one.written_at for one in syncs if one.written_at is not None]
    assert waits
    assert max(waits) < 30, "a second, and more only because the machine is busy"


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_removed_workers_files_go_only_when_the_disk_knows_of_the_removal(
    durability: DurabilityMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may bring the record back, and then its secrets must be there, or the directory set aside."""
    told: list[str] = []

    def telling(what: str, act: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            answer = act(*arguments)
            told.append(what)
            return answer

        return call

    with Deck(tmp_path / "state", durability=durability) as deck:
        deck.start("ada", FOREVER, secrets={"KEY": "value"})
        monkeypatch.setattr(Registry, "delete", telling("recorded", Registry.delete))
        monkeypatch.setattr(Registry, "sync", telling("synced", Registry.sync))
        monkeypatch.setattr(disk, "remove_tree", telling("gone", disk.remove_tree))
        deck.remove("ada")
        assert "synced" in told[told.index("recorded") : told.index("gone")]
        assert list((tmp_path / "state" / "workers").iterdir()) == []


def test_no_answer_waits_for_the_empty_home_of_a_new_worker(tmp_path: Path) -> None:
    """The record is synced before the answer, the directories a moment later: recovery makes them again."""
    _needs_strace()
    state, trace = tmp_path / "state", tmp_path / "trace"
    words = power_trace.command(trace, sys.executable, deck_owner.__file__, str(state), "power")
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        owner = Owner(run)
        try:
            assert owner.answer() == "open"
            owner.ask("start", "w", FOREVER)
            owner.ask("stop_all")
        finally:
            run.communicate(timeout=60)
    told = list(power_trace.walk(trace, state))
    [started, _] = [one for one in told if isinstance(one, power_trace.Said) and '\\"answer\\"' in one.text][1:]
    assert _ours(started.unsynced) == [str(state / "workers")]
    assert str(state / "workers") in {one.path for one in told if isinstance(one, power_trace.Sync)}


def test_the_log_tells_where_a_power_cut_may_have_taken_lines(tmp_path: Path) -> None:
    """The page cache is gone without a trace: the mark of a worker's end says that it ended with the machine."""
    state = tmp_path / "state"
    with Deck(state) as deck:
        pid = deck.start("ada", FOREVER).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with contextlib.closing(Registry.open(state / "deck.db")) as registry:
        [record] = registry.records()
        assert record.identity is not None
        earlier = msgspec.structs.replace(record.identity, boot_id="an earlier one")
        registry.save(msgspec.structs.replace(record, identity=earlier))
    with Deck(state) as deck:
        said = deck.logs("ada")
        [ended] = [event for event in deck.events() if event.kind in {EventKind.EXITED, EventKind.CRASHED}]
        deck.stop("ada")
    assert any(f"ended pid={pid} with the machine: what it wrote last may not have reached" in line for line in said)
    assert "switched off or booted anew" in ended.detail["why_unknown"]


def test_the_file_says_what_an_answer_survives(tmp_path: Path) -> None:
    """``[deck]`` in everdeck.toml; a word that is neither is refused with its line."""
    file = tmp_path / "everdeck.toml"
    file.write_text('[deck]\ndurability = "process"\n')
    assert config.load(file).deck.durability == "process"
    file.write_text('[deck]\ndurability = "always"\n')
    with pytest.raises(ConfigRefused, match=r"line 2: deck\.durability"):
        config.load(file)


def test_an_unknown_durability_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is opened."""
    with pytest.raises(SpecError, match=r"durability.*power"):
        Deck(tmp_path / "state", durability="always")  # type: ignore[arg-type]
    with Deck(tmp_path / "state"):
        pass


def _ours(paths: frozenset[str]) -> list[str]:
    """What a record speaks of: the registry's log, secrets and directories. Not logs, locks and what is temporary."""
    own = ("/deck.db-wal", "/secrets", "/workers")
    return sorted(path for path in paths if path.endswith(own) or ("/secrets/" in path and not path.endswith(".new")))


def _needs_strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace (Debian package strace)")

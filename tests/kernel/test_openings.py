"""What is kept open for the next sandbox means what its names mean now, or is opened anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everdeck.kernel import openings
from everdeck.kernel.descriptors import HIGH
from everdeck.kernel.openings import RULE, Named, Openings

READ, OF_A_FILE = 0b1101, 0b0101


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose files are kept open, also though it was made just now."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/zone").touch()
    (tmp_path / "passwd").write_text("root")
    (tmp_path / "localtime").symlink_to("usr/zone")
    (tmp_path / "resolv.conf").symlink_to("/run/elsewhere")
    monkeypatch.setattr(openings, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(openings, "_AT_REST_SECONDS", -3600.0)
    return tmp_path


def names(etc: Path) -> tuple[Named, ...]:
    """Files, links, a folder, what is not there, and what lies deeper."""
    listed = ("usr", "passwd", "localtime", "resolv.conf", "missing", "usr/zone")
    return ((READ, tuple(f"{etc}/{name}" for name in listed)),)


def opened(kept: Openings) -> dict[str, int]:
    """What its rules mean: paths and rights."""
    rules = [RULE.unpack_from(kept.rules, at) for at in range(0, len(kept.rules), RULE.size)]
    return {str(Path(f"/proc/self/fd/{fd}").readlink()): access for access, fd in rules}


def test_what_lies_in_the_folders_is_kept_under_high_numbers(etc: Path) -> None:
    """A folder and a file become rules; a link that leads into a kept folder needs none, others go by name."""
    kept = Openings(names(etc), OF_A_FILE)

    assert opened(kept) == {f"{etc}/usr": READ, f"{etc}/passwd": OF_A_FILE}
    assert kept.by_name == ((READ, (f"{etc}/resolv.conf", f"{etc}/usr/zone")),)
    assert kept.serve(names(etc))
    assert all(RULE.unpack_from(kept.rules, at)[1] >= HIGH for at in range(0, len(kept.rules), RULE.size))


def test_a_file_that_is_replaced_is_opened_anew(etc: Path) -> None:
    """As every editor and package manager does it: another file is renamed over the name."""
    kept = Openings(names(etc), OF_A_FILE)
    (etc / "usr/new").write_text("other")
    (etc / "usr/new").replace(etc / "passwd")

    assert not kept.serve(names(etc))


def test_a_new_name_is_seen(etc: Path) -> None:
    """What was not there had no rule; it has one when it comes."""
    kept = Openings(names(etc), OF_A_FILE)
    (etc / "missing").touch()

    assert not kept.serve(names(etc))
    assert f"{etc}/missing" in opened(Openings(names(etc), OF_A_FILE))


def test_other_names_are_not_served(etc: Path) -> None:
    """Another deck may hide another part of the system."""
    kept = Openings(names(etc), OF_A_FILE)

    assert not kept.serve(((READ, (f"{etc}/passwd",)),))


def test_a_folder_that_has_just_changed_is_not_relied_on(etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next change may fall into the same tick of the clock, and would not be seen."""
    monkeypatch.setattr(openings, "_AT_REST_SECONDS", 2.0)
    (etc / "passwd").rename(etc / "other")
    kept = Openings(names(etc), OF_A_FILE)

    assert kept.rules == b""
    assert kept.by_name == names(etc)
    assert not kept.serve(names(etc)), "the next start looks again, also though nothing has changed since"


def test_descriptors_end_with_whoever_used_them_last(etc: Path) -> None:
    """A rule must never be added with a number that was closed and means another file by now."""
    table = Path("/proc/self/fd")
    before = len(list(table.iterdir()))
    kept = Openings(names(etc), OF_A_FILE)
    assert len(list(table.iterdir())) == before + 3  # two files, and the mounts
    del kept

    assert len(list(table.iterdir())) == before


def test_a_low_limit_leaves_no_descriptor_open(etc: Path) -> None:
    """Where there are no high numbers, all are opened by name at each start."""
    code = f"""
import os, resource
from everdeck.kernel import openings
openings._FOLDERS, openings._AT_REST_SECONDS = ({str(etc)!r},), -3600.0
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))
before = sorted(os.listdir("/proc/self/fd"))
names = ((13, ({str(etc / "passwd")!r},)),)
kept = openings.Openings(names, 5)
assert (kept.rules, kept.by_name) == (b"", names) and not kept.serve(names)
assert sorted(os.listdir("/proc/self/fd")) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_mount_over_a_name_is_seen(etc: Path) -> None:
    """It changes no time of any directory."""
    code = f"""
import subprocess
from everdeck.kernel import openings
openings._FOLDERS, openings._AT_REST_SECONDS = ({str(etc)!r},), -3600.0
names = ((13, ({str(etc / "passwd")!r},)),)
kept = openings.Openings(names, 5)
assert kept.rules and kept.serve(names) and kept.serve(names)
subprocess.run(["mount", "--bind", {str(etc / "usr/zone")!r}, {str(etc / "passwd")!r}], check=True)
assert not kept.serve(names)
"""
    private = ["unshare", "--mount"]
    if subprocess.run([*private, "true"], check=False).returncode != 0:
        pytest.skip("no mount namespaces here")
    subprocess.run([*private, sys.executable, "-c", code], check=True)

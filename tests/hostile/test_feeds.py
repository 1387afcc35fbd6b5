"""A satellite of another account owns the file of its feed: what it puts there moves nobody who has more rights."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.deck.feeds import open_attachment
from everdeck.errors import MessageError
from support.hostile_accounts import Account, open_place

HOST = Path(__file__).parent.parent / "support/hostile_feed_host.py"
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def python(mallory: Account) -> Iterator[Path]:
    """An interpreter with everdeck that every account can run: this one's may lie where only its owner can read."""
    with open_place() as folder:
        venv = folder / "venv"
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", venv], check=True, capture_output=True)
        found = next(venv.glob("lib/python*/site-packages"))
        source = Path(__file__).parents[2] / "src"
        (found / "test.pth").write_text(f"{source}\n{sysconfig.get_path('purelib')}\n")
        able = mallory.run(venv / "bin/python", "-Ic", "import everdeck.feed.far_claims", expect=None)
        if able.returncode != 0:
            pytest.skip(f"another account cannot run everdeck with {PYTHON}: {able.stderr[-200:]}")
        yield venv / "bin/python"


def test_what_a_satellite_plants_as_its_feed_is_opened_with_its_own_rights(
    place: Path, mallory: Account, python: Path
) -> None:
    """Root reads, finishes and sends as ever; a link, a pipe, a second name and a cut mapping get it nothing."""
    treasure = place / "treasure"
    treasure.touch(mode=0o600)
    done = subprocess.run(
        [python, "-P", HOST, place / "state", mallory.name, treasure],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["text"] == "hello"
    assert told["done"] == 1
    assert told["owners"] == [mallory.uid]
    for trap in ("link", "second name", "pipe", "journal", "not a database"):
        assert told[trap].startswith("InboxUnavailable"), (trap, told[trap])
    assert told["cut"] == "still here"
    assert told["kept"] == [1, True, True], "one reader of the satellite's account, used again"
    assert (told["kept after traps"], told["kept after its end"]) == (1, 0)
    assert treasure.read_bytes() == b""
    assert treasure.stat().st_uid == 0


def test_an_attachment_longer_than_our_memory_is_read_in_pieces(tmp_path: Path) -> None:
    """A file with holes costs its maker nothing."""
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 1 << 40)
    with open_attachment(tmp_path, str(tmp_path / "holes")) as holes:
        assert holes.read(10) == bytes(10)


@pytest.mark.parametrize("trap", ["link", "linked folder", "second name", "pipe", "upward", "elsewhere"])
def test_only_the_satellites_own_files_are_attachments(tmp_path: Path, trap: str) -> None:
    """The path in a message is the satellite's word."""
    data = tmp_path / "data"
    (data / "files").mkdir(parents=True)
    (data / "files/plain").write_bytes(b"its own")
    secret = tmp_path / "secret"
    secret.write_bytes(b"not its own")
    with open_attachment(data, str(data / "files/plain")) as plain:
        assert plain.read() == b"its own"
    path = data / "files/x"
    match trap:
        case "link":
            path.symlink_to(secret)
        case "linked folder":
            (data / "out").symlink_to(tmp_path)
            path = data / "out/secret"
        case "second name":
            os.link(secret, path)
        case "pipe":
            os.mkfifo(path)
        case "upward":
            path = data / "../secret"
        case "elsewhere":
            path = secret
    with pytest.raises(MessageError, match="cannot be read"):
        open_attachment(data, str(path))

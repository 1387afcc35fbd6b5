"""What a worker of another account can do about its secrets: read them, and nothing else."""

import asyncio
import contextlib
import os
import stat
from pathlib import Path

import pytest

from everdeck import AsyncDeck, Secret
from everdeck.errors import EverdeckError
from support.hostile_accounts import Account

SLEEPER = ["sleep", "1000"]
PATIENCE_SECONDS = 60.0


def _give_away_as_before(folder: Path, account: Account) -> None:
    """A directory as earlier versions left it: the worker's own, so that it may put anything there."""
    os.chown(folder, account.uid, account.gid)


def _open_to_all(folder: Path) -> Path:
    """A file of root's that only root may read, in a directory that others can pass through."""
    treasure = folder / "treasure"
    treasure.write_text("root's own words")
    treasure.chmod(0o600)
    return treasure


def _environment(pid: int | None) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def _within_patience(deck: AsyncDeck, mallory: Account, **fields: object) -> None:
    with contextlib.suppress(EverdeckError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await deck.start("alice", SLEEPER, user=mallory.name, replace=True, **fields)


def test_the_worker_reads_its_secrets_and_cannot_change_them(place: Path, mallory: Account, victim: Account) -> None:
    """The account reads the file; it can neither write, replace, remove nor add one; another account sees nothing."""

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", SLEEPER, user=mallory.name, secrets={"TOKEN": "sesame"})
            folder = place / "state/workers/alice/secrets"
            assert mallory.run("cat", folder / "TOKEN").stdout == "sesame"
            assert mallory.run("ls", folder).stdout == "TOKEN\n"
            for attack in (f"echo x >> {folder}/TOKEN", f"rm -f {folder}/TOKEN", f"ln -s /etc/passwd {folder}/y"):
                assert mallory.run("sh", "-c", attack, expect=None).returncode != 0, attack
            assert mallory.run("chmod", "0666", folder / "TOKEN", expect=None).returncode != 0
            assert victim.run("cat", folder / "TOKEN", expect=None).returncode != 0
            assert victim.run("ls", folder, expect=None).returncode != 0
            assert folder.stat().st_uid == 0
            assert mallory.run("cat", folder / "TOKEN").stdout == "sesame"
            await deck.stop("alice")

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["x", ".TOKEN.new", "TOKEN"])
def test_a_link_in_secrets_gives_no_file_away(place: Path, mallory: Account, name: str) -> None:
    """Neither its owner, its mode nor its content changes when a link to it lies where our files are made."""
    treasure = _open_to_all(place)
    before = treasure.stat()

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", SLEEPER, user=mallory.name, secrets={"TOKEN": "sesame"})
            folder = place / "state/workers/alice/secrets"
            _give_away_as_before(folder, mallory)
            mallory.run("ln", "-sf", treasure, folder / name)
            await _within_patience(deck, mallory, secrets={"TOKEN": "simsim"})
            assert mallory.run("cat", folder / "TOKEN").stdout == "simsim"

    asyncio.run(scenario())
    after = treasure.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (before.st_uid, before.st_gid, 0o600)
    assert treasure.read_text() == "root's own words"


@pytest.mark.parametrize("trap", ["symbolic link", "second name"])
def test_a_secret_that_is_a_link_is_not_read_into_the_environment(place: Path, mallory: Account, trap: str) -> None:
    """With ``env`` the daemon reads the file as root: it must be the file that it wrote."""
    treasure = _open_to_all(place)

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", SLEEPER, user=mallory.name, secrets={"TOKEN": Secret("sesame", env=True)})
            folder = place / "state/workers/alice/secrets"
            _give_away_as_before(folder, mallory)
            mallory.run("rm", folder / "TOKEN")
            if trap == "symbolic link":
                mallory.run("ln", "-s", treasure, folder / "TOKEN")
            else:  # as on a machine without fs.protected_hardlinks
                os.link(treasure, folder / "TOKEN")
            with pytest.raises(EverdeckError, match="TOKEN"):
                await deck.restart("alice")
            status = await deck.status("alice")
            assert status.pid is None or b"root's own" not in _environment(status.pid)

    asyncio.run(scenario())


def test_a_pipe_in_secrets_does_not_stop_the_owner(place: Path, mallory: Account) -> None:
    """Opening a FIFO waits for its other end, for ever: neither this owner nor the next one may."""

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", SLEEPER, user=mallory.name, secrets={"TOKEN": Secret("sesame", env=True)})
            folder = place / "state/workers/alice/secrets"
            _give_away_as_before(folder, mallory)
            mallory.run("rm", folder / "TOKEN")
            mallory.run("mkfifo", folder / "TOKEN")
            with pytest.raises(EverdeckError, match="TOKEN"):
                await deck.restart("alice")
        async with AsyncDeck(place / "state") as deck:
            await _within_patience(deck, mallory, secrets={"TOKEN": Secret("simsim", env=True)})
            environment = _environment((await deck.status("alice")).pid)
            assert b"TOKEN=simsim" in environment
            await deck.stop("alice")

    asyncio.run(scenario())

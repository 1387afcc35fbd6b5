"""``limits.disk_bytes``: enforced where the file system has project quotas in use, refused by name elsewhere."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck import AsyncDeck, Limits, Restart
from everdeck.errors import LimitUnavailable
from everdeck.kernel import quotas
from support.hostile_accounts import open_place
from support.waiting import eventually

MOST_BYTES = 1 << 20
FILL = ["sh", "-c", "dd if=/dev/zero of=big bs=64k count=64; stat -c %s big; touch said; exec sleep 1000"]


@pytest.fixture
def limited() -> Iterator[Path]:
    """A directory on an ext4 file system with project quotas, made for the test."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4: a file system is made and mounted")
    with open_place() as around:
        yield from _mounted(around / "image", around / "mounted")


def _mounted(image: Path, place: Path) -> Iterator[Path]:
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop,prjquota", image, place], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("this kernel has no quotas for ext4 (CONFIG_QFMT_V2), or no loop devices")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_worker_fills_its_share_and_no_more(limited: Path) -> None:
    """Together with what was there before; without the limit it may go on; a number is free when its worker is gone."""

    async def scenario() -> None:
        async with AsyncDeck(limited / "state") as deck:
            data = limited / "state/workers/alice/data"

            async def filled(limits: Limits) -> int:
                await deck.start("alice", FILL, user="auto", limits=limits, restart=Restart("never"), replace=True)
                await eventually((data / "said").exists, "the worker has written")
                await deck.stop("alice")
                (data / "said").unlink()
                return (data / "big").stat().st_size

            assert await filled(Limits(disk_bytes=MOST_BYTES)) <= MOST_BYTES
            project = int((data.parent / "quota").read_text())
            assert 0 < quotas.used(data, project) <= MOST_BYTES
            assert await filled(Limits()) == 64 * 65536
            # What is there counts from the start: there is no room for a byte more.
            (data / "big").rename(data / "before")
            assert await filled(Limits(disk_bytes=MOST_BYTES)) == 0
            await deck.remove("alice")
            fd = os.open(limited, os.O_RDONLY)
            assert quotas._limits(fd, project)[0] == 0
            os.close(fd)

    asyncio.run(scenario())


def test_it_is_refused_by_name_where_it_cannot_be_kept(tmp_path: Path) -> None:
    """The reason says what is missing, and nothing was written."""
    why = quotas.why_not(tmp_path)
    if why is None:
        pytest.skip("project quotas are in use here")

    async def scenario() -> None:
        async with AsyncDeck(tmp_path / "state") as deck:
            with pytest.raises(LimitUnavailable, match=r"limits.disk_bytes.*quota"):
                await deck.start("alice", ["sleep", "1000"], limits=Limits(disk_bytes=MOST_BYTES))
            assert not (tmp_path / "state/workers/alice").exists()

    asyncio.run(scenario())

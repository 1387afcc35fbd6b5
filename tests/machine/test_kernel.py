"""The tests of the kernel layer on Debian 12's kernel, as root."""

import json
import re

import pytest

from support.machine import Machine
from support.repo_examples import ROOT

PYTEST = "/opt/venv/bin/python -m pytest -q -p no:xdist -p no:cacheprovider --timeout=0"
LAYER = "tests/kernel tests/process/test_health_keeper.py::test_a_command_that_hangs_is_ended_with_what_it_forked"
TABLE = ROOT / "docs" / "reference" / "kernels.md"


@pytest.mark.parametrize("whose", ["root", "bots"])
def test_no_daemon_gets_away_from_a_delegated_cgroup(machine: Machine, whose: str) -> None:
    """60 workers that daemonise at once: as root, and in a slice that `systemd --user` delegates."""
    if whose == "bots":
        machine.run("loginctl enable-linger bots")
    manager = "" if whose == "root" else "--user"
    told = machine.suite(
        f"export XDG_RUNTIME_DIR=/run/user/$(id -u); systemd-run {manager} -q --wait --pipe --collect "
        f"-p Delegate=yes -p WorkingDirectory=/opt/everdeck --setenv=EVERDECK_DAEMONISERS=60 "
        f"{PYTEST} tests/process/test_daemonisers.py",
        user=whose,
    )
    assert "1 passed" in told, told


def test_the_kernel_layer_holds_on_an_older_kernel(machine: Machine) -> None:
    """tests/kernel inside, and checks that hang; what needs a newer kernel skips there and says so."""
    told = machine.suite(f"cd /opt/everdeck && EVERDECK_BOMBERS=20 {PYTEST} -rs {LAYER}")
    print(told)
    assert told.rstrip().endswith("ended 0"), told[-6000:]


def test_the_doctor_names_what_the_kernel_lacks(machine: Machine) -> None:
    """Each row of the reference's table that is newer than this kernel, in words, and nothing else by its version."""
    told = json.loads(machine.run("everdeck doctor --json --state /root/doctored", check=False))
    here = _version(told["kernel"])
    rows = {_version(row) for row in re.findall(r"^\| (\d+\.\d+) \|", TABLE.read_text("utf-8"), re.MULTILINE)}
    named = [(_version(found[1]), one) for one in told["features"] if (found := re.search(r"\((\d.*)\)$", one["name"]))]
    assert {version for version, one in named if not one["present"]} == {row for row in rows if row > here}
    assert all(one["without"] for _, one in named)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)

"""The tests of the kernel layer on Debian 12's kernel, as root."""

import pytest

from support.machine import Machine


@pytest.mark.parametrize("whose", ["root", "bots"])
def test_no_daemon_gets_away_from_a_delegated_cgroup(machine: Machine, whose: str) -> None:
    """60 workers that daemonise at once: as root, and in a slice that `systemd --user` delegates."""
    if whose == "bots":
        machine.run("loginctl enable-linger bots")
    manager = "" if whose == "root" else "--user"
    told = machine.run(
        f"export XDG_RUNTIME_DIR=/run/user/$(id -u); systemd-run {manager} -q --wait --pipe --collect "
        "-p Delegate=yes -p WorkingDirectory=/opt/everdeck --setenv=EVERDECK_DAEMONISERS=60 "
        "/opt/venv/bin/python -m pytest -q -p no:xdist --timeout=0 tests/process/test_daemonisers.py",
        user=whose,
    )
    assert "1 passed" in told


def test_the_kernel_layer_holds_on_an_older_kernel(machine: Machine) -> None:
    """tests/kernel inside; what needs a newer kernel skips there and says so."""
    log = "/root/kernel.log"
    suite = "cd /opt/everdeck && /opt/venv/bin/python -m pytest -q -p no:xdist --timeout=0 tests/kernel"
    machine.run(f"(setsid sh -c '{suite}; echo ended $?' >{log} 2>&1 </dev/null &)")
    machine.until("the suite ends", lambda: "ended" in machine.run(f"tail -n 1 {log}"), 6000)
    told = machine.run(f"cat {log}")
    assert told.rstrip().endswith("ended 0"), told[-6000:]

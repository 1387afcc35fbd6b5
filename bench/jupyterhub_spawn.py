"""Many users of a JupyterHub spawn at once: Everdeck's spawner beside JupyterHub's own, in one run.

    python bench/jupyterhub_spawn.py --users 100 --rounds 3          a light server: what the spawners cost
    python bench/jupyterhub_spawn.py --users 20 --rounds 1 --real    JupyterLab's own single-user server

Each round runs both, one after the other, in a fresh hub: all users ask at the same moment, and the time runs until the
hub says that every server is ready. Needs what tests/process/test_jupyterhub.py needs.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import jupyter_light  # noqa: E402 - the tests' hub, from a script that is no test
from support.jupyter_hub import Hub, running  # noqa: E402
from support.repo_processes import end_all_under  # noqa: E402

SPAWNERS = {
    "LocalProcessSpawner": (
        'c.JupyterHub.spawner_class = "simple"\nc.SimpleLocalProcessSpawner.home_dir_template = {homes!r}\n'
    ),
    "EverdeckSpawner": 'c.EverdeckSpawner.run_as = "hub"\n',
}
MORE = """
c.JupyterHub.concurrent_spawn_limit = 0
c.JupyterHub.active_server_limit = 0
c.Spawner.http_timeout = 600
c.Spawner.start_timeout = 600
"""


async def spawned_at_once(hub: Hub, users: list[str]) -> list[float]:
    """Seconds until each user's server was ready, since all of them asked."""
    headers = {"authorization": f"token {hub.token}"}
    limits = httpx.Limits(max_connections=len(users) + 10)
    async with httpx.AsyncClient(base_url=f"{hub.url}/hub/api", headers=headers, timeout=900, limits=limits) as api:
        (await api.post("/users", json={"usernames": users})).raise_for_status()
        begin = time.monotonic()
        asking = [asyncio.ensure_future(api.post(f"/users/{user}/server")) for user in users]
        ready: dict[str, float] = {}
        while len(ready) < len(users):
            listed = (await api.get("/users", params={"state": "ready", "limit": 200})).json()
            for user in listed:
                ready.setdefault(user["name"], time.monotonic() - begin)
            await asyncio.sleep(0.05)
        await asyncio.gather(*asking)
    return list(ready.values())


def processor_seconds(pid: int) -> float:
    """What a process has used so far: the hub's own work, however busy the machine is."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_round(name: str, users: list[str], *, real: bool) -> tuple[list[float], float]:
    """A fresh hub with this spawner: the times of its users, and the hub's own processor time per user."""
    place = Path(tempfile.mkdtemp(prefix="everdeck-bench-hub-"))
    args = 'c.Spawner.args = ["--allow-root"]\n'
    light = f"c.Spawner.cmd = [{sys.executable!r}, {jupyter_light.__file__!r}]\n"
    config = SPAWNERS[name].format(homes=f"{place}/homes/{{username}}") + MORE + (args if real else light)
    try:
        with running(Hub(place, config)) as hub:
            before = processor_seconds(hub.pid)
            times = asyncio.run(spawned_at_once(hub, users))
            used = processor_seconds(hub.pid) - before
            hub.stop_politely()
            return times, used / len(users) * 1000
    finally:
        end_all_under(place)
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="JupyterLab's single-user server")
    options = parser.parse_args()
    users = [f"user{number:03}" for number in range(options.users)]
    per_user: dict[str, list[float]] = {name: [] for name in SPAWNERS}
    for number in range(options.rounds):
        for name in SPAWNERS if number % 2 == 0 else reversed(SPAWNERS):
            times, hub_ms = one_round(name, users, real=options.real)
            per_user[name].append(max(times) / len(users) * 1000)
            took = f"all after {max(times):.1f} s, median {statistics.median(times):.1f} s"
            print(
                f"{name:22} {per_user[name][-1]:8.1f} ms per user ({hub_ms:.1f} of the hub's processor); {took}",
                flush=True,
            )
    theirs, ours = (statistics.median(per_user[name]) for name in SPAWNERS)
    print(f"median of {options.rounds}: {theirs:.1f} and {ours:.1f} ms per user: {ours / theirs:.2f} times")


if __name__ == "__main__":
    main()

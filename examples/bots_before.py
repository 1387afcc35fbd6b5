"""Before: one bot per user in a dict of Popen. A restart of this program empties the dict and nothing else.

Kept to be compared with ``bots_after.py``; docs/how-to/from-a-dict-of-popen.md tells what goes wrong.
"""

import subprocess
import sys

BOT = [sys.executable, "-c", "import signal; signal.pause()"]
processes: dict[str, subprocess.Popen[bytes]] = {}


def start(user: str) -> None:
    processes[user] = subprocess.Popen(BOT, env={"BOT_USER": user}, start_new_session=True)


def stop(user: str) -> None:
    processes.pop(user).terminate()


def is_running(user: str) -> bool:
    return user in processes and processes[user].poll() is None

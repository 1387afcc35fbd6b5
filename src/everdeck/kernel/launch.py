"""Runs in the worker's process, before the worker's program: applies what only the process itself can.

Called as ``python -I -S launch.py ORDERS PROGRAM ARGUMENT…``; stdlib only and imports little, because its start
is the price of every limit. On success it becomes PROGRAM and the report pipe closes; on failure the report
says which step the kernel refused, and nothing stays behind.
"""

import json
import os
import resource
import signal
import sys
import warnings  # noqa: F401 - os.execvp imports it, and the worker's account may not be allowed to read our Python
from typing import Any


def main() -> None:
    """Apply the orders in the first argument, then become the program in the rest."""
    orders: dict[str, Any] = json.loads(sys.argv[1])
    command = sys.argv[2:]
    report_fd: int = orders["report_fd"]
    os.set_inheritable(report_fd, False)  # noqa: FBT003 - the name of the argument is the function's
    step = "cgroup"
    try:
        if orders["cgroup_procs"]:
            with open(orders["cgroup_procs"], "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs its import
                file.write("0")
        step = "limits.oom_score_adj"
        if orders["oom_score_adj"] is not None:
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(str(orders["oom_score_adj"]))
        step = "limits.nice"
        if orders["nice"] is not None:
            os.setpriority(os.PRIO_PROCESS, 0, orders["nice"])
        step = "limits.open_files"
        if orders["open_files"] is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (orders["open_files"], orders["open_files"]))
        step = "group"
        if orders.get("groups") is not None:
            os.setgroups(orders["groups"])
        if orders.get("gid") is not None:
            os.setregid(orders["gid"], orders["gid"])
        step = "user"
        if orders.get("uid") is not None:
            os.setreuid(orders["uid"], orders["uid"])
        if orders["umask"] is not None:
            os.umask(orders["umask"])
        _default_signals()
        _given_locale(orders["lc_ctype"])
        step = "exec"
        os.execvp(command[0], command)  # noqa: S606 - becoming the worker's program is the point
    except Exception as err:  # noqa: BLE001 - whatever it is: without a report the start would count as done
        number = err.errno if isinstance(err, OSError) and err.errno else 22
        os.write(report_fd, json.dumps({"errno": number, "what": step}).encode())
        os._exit(127)


def _given_locale(lc_ctype: str | None) -> None:
    """In a C locale Python sets LC_CTYPE for itself and for everything that it starts (PEP 538): put it back."""
    if lc_ctype is None:
        os.environ.pop("LC_CTYPE", None)
    else:
        os.environ["LC_CTYPE"] = lc_ctype


def _default_signals() -> None:
    """Handlers end at exec by themselves; a mask and an ignored signal would be inherited."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if __name__ == "__main__":
    main()

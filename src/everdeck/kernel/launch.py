"""Runs in the worker's process, before the worker's program: applies what only the process itself can.

Called as ``python -I -S launch.py ORDERS_FD`` with an empty environment; stdlib only and imports little, because its
start is the price of what it does. The worker's command and environment are in the orders, and are used only when the
rights that the worker shall not have are gone. On success it becomes the program and the report pipe closes; on failure
the report says which step the kernel refused, and nothing stays behind. :mod:`everdeck.kernel.native` is the same in C.
"""

import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _CLEAR_ALL = 23, 24, 38, 47, 4
_MOST_CAPABILITIES = 64
_CAPGET, _CAPSET = (90, 91) if os.uname().machine == "aarch64" else (125, 126)
_LANDLOCK_RESTRICT_SELF = 446
_SECCOMP = 277 if os.uname().machine == "aarch64" else 317


def main() -> None:
    """Apply the orders, then become the program."""
    with open(int(sys.argv[1]), "rb") as file:  # noqa: PTH123 - a descriptor
        file.seek(0)
        orders: dict[str, Any] = json.load(file)
    report_fd: int = orders["report_fd"]
    os.set_inheritable(report_fd, False)  # noqa: FBT003 - the name of the argument is the function's
    if orders["ruleset_fd"] is not None:
        os.set_inheritable(orders["ruleset_fd"], False)  # noqa: FBT003
    step = "cgroup"
    try:
        for step in _apply(orders):  # noqa: B007 - the step that was under way is what the report names
            pass
        step = "exec"
        _become(orders["programs"], orders["command"], orders["env"])
    except Exception as err:  # noqa: BLE001 - whatever it is: without a report the start would count as done
        number = err.errno if isinstance(err, OSError) and err.errno else errno.EINVAL
        os.write(report_fd, json.dumps({"errno": number, "what": step}).encode())
        os._exit(127)


def _apply(orders: dict[str, Any]) -> Iterator[str]:  # noqa: C901, PLR0912 - a list of steps, each taken if it was asked for
    """Each step is named before it is taken."""
    # Loaded now: the worker's account may not be allowed to read our Python.
    libc: Any = _libc() if orders["no_capabilities"] or orders["no_new_privileges"] else None
    yield "cgroup"
    if orders["cgroup"]:
        with open(orders["cgroup"] + "/cgroup.procs", "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs its import
            file.write("0")
    yield "limits.oom_score_adj"
    if orders["oom_score_adj"] is not None:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(str(orders["oom_score_adj"]))
    yield "limits.nice"
    if orders["nice"] is not None:
        os.setpriority(os.PRIO_PROCESS, 0, orders["nice"])
    yield "limits.open_files"
    if orders["open_files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (orders["open_files"], orders["open_files"]))
    elif orders["open_files_soft"] is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(orders["open_files_soft"], hard), hard))
    if orders["no_core"]:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if orders["umask"] is not None:
        os.umask(orders["umask"])
    yield "sandbox: capabilities"
    if orders["no_capabilities"]:
        _empty_capabilities(libc)
    yield "group"
    if orders["groups"] is not None:
        os.setgroups(orders["groups"])
    if orders["gid"] is not None:
        os.setresgid(orders["gid"], orders["gid"], orders["gid"])
    yield "user"
    if orders["uid"] is not None:
        os.setresuid(orders["uid"], orders["uid"], orders["uid"])
    yield "cwd"
    os.chdir(orders["cwd"])
    yield "sandbox: no new privileges"
    if orders["no_new_privileges"]:
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    yield "sandbox: landlock"
    if orders["ruleset_fd"] is not None:
        _checked(libc.syscall(_LANDLOCK_RESTRICT_SELF, orders["ruleset_fd"], 0))
    _default_signals()
    yield "sandbox: seccomp"
    if orders["filter"]:
        _install_filter(libc, bytes.fromhex(orders["filter"]))


def _become(programs: list[str], command: list[str], env: dict[str, str]) -> None:
    """As execvp, in the worker's own PATH."""
    refused: OSError = FileNotFoundError(errno.ENOENT, "not found")
    for program in programs:
        try:
            os.execve(program, command, env)  # noqa: S606 - becoming the worker's program is the point
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as err:
            refused = err
    raise refused


def _default_signals() -> None:
    """Handlers end at exec by themselves; a mask and an ignored signal would be inherited."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _libc() -> Any:
    import ctypes  # noqa: PLC0415 - 5 ms that only a sandbox needs

    return ctypes.CDLL(None, use_errno=True)


def _checked(answer: int) -> None:
    if answer < 0:
        import ctypes  # noqa: PLC0415 - loaded already

        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _empty_capabilities(libc: Any) -> None:
    import ctypes  # noqa: PLC0415 - loaded already

    # PR_CAPBSET_READ tells where the list ends; /proc/sys, which does too, is missing in some containers.
    for one in range(_MOST_CAPABILITIES):
        if libc.prctl(_PR_CAPBSET_READ, one, 0, 0, 0) < 0:
            break
        _checked(libc.prctl(_PR_CAPBSET_DROP, one, 0, 0, 0))
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    _checked(libc.syscall(_CAPGET, header, sets))
    sets[2] = sets[5] = 0
    _checked(libc.syscall(_CAPSET, header, sets))


def _install_filter(libc: Any, program: bytes) -> None:
    import ctypes  # noqa: PLC0415 - loaded already

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    _checked(libc.syscall(_SECCOMP, 1, 0, ctypes.byref(Program(len(program) // 8, program))))


if __name__ == "__main__":
    main()

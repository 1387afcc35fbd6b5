"""Workers that do not want to leave: ``python child_worst.py KIND NAME FIFO``; each role says its pid on the FIFO.

Kept to the standard library and quick to start: these are the programs that people run, not ours.
"""

import os
import signal
import sys
import time

KIND, NAME, FIFO = sys.argv[1:4]


def say(role: str) -> None:
    """Tell the test who this is."""
    with open(FIFO, "w", encoding="ascii") as fifo:  # noqa: PTH123 - quick to start
        fifo.write(f"{NAME} {role} {os.getpid()}\n")


def ignore_everything() -> None:
    """No signal that can be ignored ends us."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)


def stay() -> None:
    """For ever."""
    while True:
        time.sleep(60)


def close_all() -> None:
    """Drop the lifeline, the lock and the log."""
    os.closerange(0, 1024)


def forked(role: str, *, detach: bool = False, clear: bool = False) -> None:
    """A deaf child with a role of its own."""
    if os.fork():
        return
    if detach:
        os.setsid()
    if clear:
        os.execve(sys.executable, [sys.executable, "-S", "-E", __file__, "deaf-child", NAME, FIFO], {})  # noqa: S606
    ignore_everything()
    say(role)
    stay()


def main() -> None:
    """Be the kind of worker that was asked for."""
    if KIND == "deaf-child":
        ignore_everything()
        say("child")
        stay()
    if KIND != "stopped":
        ignore_everything()
    match KIND:
        case "closes-stdin":
            os.close(0)
        case "double-forks":
            if os.fork() == 0:
                os.setsid()
                forked("daemon")
                os._exit(0)
            os.wait()
        case "setsid":
            forked("child", detach=True)
        case "clears-environment":
            forked("child", detach=True, clear=True)
    say("leader")
    match KIND:
        case "closes-everything":
            close_all()
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "forks-in-a-loop":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                if os.fork() == 0:
                    time.sleep(1)
                    os._exit(0)
                time.sleep(0.01)
    stay()


if __name__ == "__main__":
    main()

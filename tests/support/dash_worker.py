"""Workers for tests of the page. Run as a program: ``python dash_worker.py KIND``.

``colours`` prints a line in each colour and then one more for each line it reads from its fifo ``more``;
``family`` forks a child; ``status`` speaks the notify protocol; ``stubborn`` ignores SIGTERM; ``crash`` fails at once.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main(kind: str) -> None:
    """Be one of the workers."""
    match kind:
        case "colours":
            _colours()
        case "family":
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            print(f"child {child.pid}", flush=True)
            signal.pause()
        case "status":
            _notify(f"READY=1\nSTATUS={sys.argv[2]}")
            print("ready", flush=True)
            signal.pause()
        case "many":
            for number in range(int(sys.argv[2])):
                sys.stdout.write(f"line {number} of many\n")
            sys.stdout.flush()
            signal.pause()
        case "echo":
            print(sys.argv[2], flush=True)
            signal.pause()
        case "crash":
            print("about to fail", flush=True)
            sys.exit(3)
        case "quiet":
            signal.pause()
        case "busy":
            _busy()
        case "refuse":
            print("\x1b[32mINFO\x1b[0m  connecting to the API")
            print("\x1b[1;31mERROR\x1b[0m 401 Unauthorized: the token was revoked", flush=True)
            sys.exit(1)
        case _:
            raise SystemExit(f"no such worker: {kind}")


def _colours() -> None:
    print("plain first line")
    for code in range(30, 38):
        print(f"\x1b[{code}mcolour {code}\x1b[0m and \x1b[1mbold\x1b[0m")
    print("\x1b[38;5;208morange\x1b[0m \x1b[38;2;10;200;150mtrue colour\x1b[0m", flush=True)
    fifo = Path("more")
    if not fifo.exists():
        os.mkfifo(fifo)
    while True:
        with fifo.open() as lines:
            for line in lines:
                print(line.rstrip("\n"), flush=True)


def _busy() -> None:
    """A believable bot for pictures: a little work, a little talk."""
    levels = ["\x1b[32mINFO\x1b[0m ", "\x1b[32mINFO\x1b[0m ", "\x1b[33mWARN\x1b[0m ", "\x1b[36mDEBUG\x1b[0m"]
    ballast = bytearray(int(sys.argv[2]) * 1_000_000)
    _notify("READY=1\nSTATUS=polling, 3 chats waiting" if len(sys.argv) > 3 else "READY=1")
    number = os.getpid() * 31
    while True:
        number += 1
        level = levels[number % 4 if number % 7 == 0 else 0]
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        took = sum(i * i for i in range(20_000 + 9_000 * (number % 5))) % 90 + 4
        print(
            f"\x1b[2m{stamp}\x1b[0m {level} update \x1b[1m{482_000 + number % 9000}\x1b[0m "
            f"from chat {number * 31 % 977}: handled in {took} ms",
            flush=True,
        )
        ballast[number % len(ballast)] = 1
        time.sleep(0.4)


def _notify(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    # As libsystemd does: a manager that is not there just now is no reason to end.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        channel.send(text.encode())


if __name__ == "__main__":
    main(sys.argv[1])

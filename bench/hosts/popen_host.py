"""The bare Python limit: ``subprocess.Popen`` in a loop, replaced when the pidfd says so, killed in a loop.

It records nothing, captures nothing and proves nothing: this is what a script costs that only starts processes.
"""

import os
import selectors
import signal
import subprocess
import time
from typing import Any

from bench.hosts.protocol import answer, channel, read_requests, timed


def main() -> None:
    reading, writing = channel()
    selector = selectors.DefaultSelector()
    selector.register(reading, selectors.EVENT_READ, None)
    commands: list[list[str]] = []
    running: list[subprocess.Popen[bytes]] = []
    pidfds: list[int] = []
    grace_seconds = 5.0

    def start() -> None:
        running.extend([subprocess.Popen(command) for command in commands])

    def watch(index: int) -> None:
        pidfds[index] = os.pidfd_open(running[index].pid)
        selector.register(pidfds[index], selectors.EVENT_READ, index)

    def forget(index: int) -> None:
        selector.unregister(pidfds[index])
        os.close(pidfds[index])

    def stop() -> None:
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def handle(request: dict[str, Any]) -> None:
        nonlocal grace_seconds
        match request["verb"]:
            case "up":
                commands[:] = [command for _, command in request["workers"]]
                grace_seconds = request["grace_seconds"]
                answer(writing)
            case "start":
                span = timed(start)
                pidfds[:] = [-1] * len(running)
                for index in range(len(running)):
                    watch(index)
                answer(writing, **span)
            case "stop":
                for index in range(len(running)):
                    forget(index)
                answer(writing, **timed(stop))
                running.clear()

    buffered = bytearray()
    while True:
        for key, _ in selector.select():
            if key.data is None:
                requests = read_requests(reading, buffered)
                if requests is None:
                    return
                for request in requests:
                    handle(request)
            elif running:
                index = key.data
                running[index].wait()
                forget(index)
                running[index] = subprocess.Popen(commands[index])
                watch(index)


if __name__ == "__main__":
    main()

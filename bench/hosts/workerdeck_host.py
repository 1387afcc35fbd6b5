"""workerdeck's ``WorkerManager`` as its users run it: started per user, reconciled in a loop."""

import selectors
from typing import Any

from workerdeck import WorkerManager  # type: ignore[import-not-found]  # lives in the peer's own environment

from bench.hosts.protocol import answer, channel, read_requests, timed

# Its own example reconciles from a loop that sleeps a second; nothing in it reports a death.
RECONCILE_SECONDS = 1.0


def main() -> None:
    reading, writing = channel()
    selector = selectors.DefaultSelector()
    selector.register(reading, selectors.EVENT_READ)
    manager: Any = None
    users: dict[int, dict[str, str]] = {}

    def start() -> None:
        for user, config in users.items():
            manager.start(user, config=config)

    def stop() -> None:
        for user in users:
            manager.stop(user, timeout=grace_seconds)

    grace_seconds = 5.0
    buffered = bytearray()
    while True:
        if not selector.select(RECONCILE_SECONDS if manager is not None else None):
            manager.reconcile()
            continue
        requests = read_requests(reading, buffered)
        if requests is None:
            return
        for request in requests:
            match request["verb"]:
                case "up":
                    grace_seconds = request["grace_seconds"]
                    commands = [command for _, command in request["workers"]]
                    users = {user: {"STAMP": order} for user, (_, order) in enumerate(commands)}
                    program, directory = commands[0][0], request["directory"]

                    def opened(program: str = program, directory: str = directory) -> None:
                        nonlocal manager
                        # The worker is started as [python_exe, "-u", script]; our worker takes its order from $STAMP.
                        manager = WorkerManager(
                            program, f"{directory}/state", python_exe=program, base_port=None, auto_restart=True
                        )

                    answer(writing, **timed(opened))
                case "start":
                    answer(writing, **timed(start))
                case "stop":
                    answer(writing, **timed(stop))


if __name__ == "__main__":
    main()

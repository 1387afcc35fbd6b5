"""Holds circus's own client open and passes orders on; the daemon is a process of its own."""

import time
from typing import Any

from circus.client import CircusClient  # type: ignore[import-not-found]  # lives in the peer's own environment
from circus.exc import CallError  # type: ignore[import-not-found]

from bench.hosts.protocol import answer, channel, read_requests


def main() -> None:
    reading, writing = channel()
    client: Any = None
    names: list[str] = []
    buffered = bytearray()
    while (requests := read_requests(reading, buffered)) is not None:
        for request in requests:
            match request["verb"]:
                case "up":
                    names = [name for name, _ in request["workers"]]
                    client = connected(request["directory"], len(request["workers"]))
                    answer(writing)
                case verb:
                    begin_ns = time.monotonic_ns()
                    tell(client, verb, names)
                    answer(writing, begin_ns=begin_ns, end_ns=time.monotonic_ns())


def tell(client: Any, verb: str, names: list[str]) -> None:
    """Stop all in one message; start by name, as a pattern passes over watchers that do not start by themselves."""
    if verb == "stop":
        client.send_message(verb, waiting=True)
    else:
        for name in names:
            client.send_message(verb, name=name, waiting=True)


def connected(directory: str, workers: int) -> Any:
    """A client whose daemon has loaded every watcher."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        client = CircusClient(endpoint=f"ipc://{directory}/c.sock", timeout=2)
        try:
            if client.send_message("numwatchers").get("numwatchers") == workers:
                return CircusClient(endpoint=f"ipc://{directory}/c.sock", timeout=600)
        except CallError:
            pass
        client.stop()
        time.sleep(0.05)
    raise TimeoutError("circusd did not answer")


if __name__ == "__main__":
    main()

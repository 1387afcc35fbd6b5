"""An owner in a process of its own, so that a test can kill it: it does what it is told, a JSON line at a time.

One process may own several decks (a test of the four layers opens one per column). Results and errors come back as
JSON. What the workers say comes through a FIFO that the test reads, so the test knows every pid of a tree by the
word of the process that has it.
"""

import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from support.child_program import DEADLINE_SECONDS, Program

_SOURCE = """
    import asyncio, json, os, re, sys
    import msgspec
    from everdeck.deck import AsyncDeck
    from everdeck.model import Health, Restart, Stop

    decks = {}
    KINDS = {"stop": Stop, "restart": Restart, "health": Health}

    async def guardian_pid(deck):
        # As everybody can see it: the first layer of any bound worker names the guardian.
        for worker in await deck.list():
            for layer in await deck.layers(worker.name):
                if found := re.search(r"guardian pid (\\d+)", layer.why):
                    return int(found[1])

    async def obey(verb, state, args, fields):
        if verb == "open":
            decks[state] = AsyncDeck(state, **({"layers": frozenset(args[0])} if args else {}))
            return await decks[state].open() and decks[state].owner_pid
        if verb == "panic":
            raise SystemError("panic")
        if verb == "guardian":
            return await guardian_pid(decks[state])
        fields = {key: KINDS[key](**value) if key in KINDS else value for key, value in fields.items()}
        result = await getattr(decks[state], verb)(*args, **fields)
        return msgspec.to_builtins(result)

    async def main():
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        unanswered = set()
        while line := await reader.readline():
            wants_answer, *order = json.loads(line)
            if not wants_answer:
                unanswered.add(asyncio.ensure_future(obey(*order)))
                continue
            try:
                answer = {"result": await obey(*order)}
            except SystemError:
                raise
            except Exception as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            print(json.dumps(answer), flush=True)

    asyncio.run(main())
"""


class OwnerError(Exception):
    """The owner answered with an error of this class name."""


class Owner(Program):
    """A process that owns decks until it is killed."""

    def __init__(self, *, env: dict[str, str] | None = None) -> None:
        super().__init__(_SOURCE, env=env, has_lifeline=False)

    def do(self, verb: str, state: Path, *args: Any, **fields: Any) -> Any:
        """Call a verb of the deck in that state directory."""
        self._say(True, verb, state, args, fields)
        answer = json.loads(self.line())
        if "error" in answer:
            raise OwnerError(answer["error"], answer["text"])
        return answer["result"]

    def tell(self, verb: str, state: Path, *args: Any, **fields: Any) -> None:
        """Give an order that is carried out beside the others and never answered."""
        self._say(False, verb, state, args, fields)

    def panic(self, state: Path) -> None:
        """Let an exception end it."""
        self._say(True, "panic", state, (), {})

    def _say(self, wants_answer: bool, verb: str, state: Path, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        os.write(self._write_fd, json.dumps([wants_answer, verb, str(state), args, fields]).encode() + b"\n")

    def kill(self) -> float:
        """SIGKILL, and wait until it is dead; answers when that was."""
        self.signal(signal.SIGKILL)
        at = time.monotonic()
        self.ended()
        return at


class Reports:
    """A FIFO on which workers say who they are: one line ``NAME ROLE PID`` each."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._unread = b""
        self.pidfds: dict[tuple[str, str], int] = {}

    def await_roles(self, name: str, *roles: str) -> None:
        """Wait until these roles of a worker have said their pid; their pidfds are opened at once."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not all((name, role) in self.pidfds for role in roles):
            left = deadline - time.monotonic()
            assert select.select([self._fd], [], [], max(0, left))[0], f"{name}: {roles} expected, {self.pidfds} came"
            self._unread += os.read(self._fd, 65536)
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                who, role, pid = line.decode().split()
                self.pidfds[who, role] = os.pidfd_open(int(pid))

    def alive(self, name: str) -> list[str]:
        """The roles of a worker that are alive now."""
        return [role for (who, role), pidfd in self.pidfds.items() if who == name and not _ended(pidfd)]

    def await_gone(self, name: str, seconds: float) -> list[str]:
        """Wait until every process of the worker is gone; the roles that are still there when the time is over."""
        deadline = time.monotonic() + seconds
        for (who, _), pidfd in self.pidfds.items():
            if who == name:
                select.select([pidfd], [], [], max(0, deadline - time.monotonic()))
        return self.alive(name)

    def close(self) -> None:
        """End whoever is left."""
        for pidfd in self.pidfds.values():
            if not _ended(pidfd):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        os.close(self._fd)


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])

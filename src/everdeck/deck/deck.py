"""What people type: a deck by where it is.

``where`` is a state directory of this machine, which this process then owns, or joins as a member if another one owns
it; ``kubernetes:NAMESPACE``, a namespace of a cluster; or ``http(s)://HOST:PORT``, somebody's daemon. Anything else is
refused by name. Whatever it is, the verbs are those of :class:`everdeck.verbs.Verbs`, and here each is handed to the
deck that was found.

For threads and plain scripts there is :class:`everdeck.deck.facade.Deck`.
"""

import asyncio
import builtins
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from everdeck import disk
from everdeck.access import LocalPeople
from everdeck.clock import Clock
from everdeck.deck import rights
from everdeck.deck.durability import DurabilityMode
from everdeck.deck.member import MemberDeck
from everdeck.deck.membership import Membership
from everdeck.deck.owner import ALL_LAYERS, Owner
from everdeck.errors import DeckClosed, SpecError, Unsupported
from everdeck.kernel import credentials
from everdeck.messages import FeedStatus, Letter, LetterVerb, MessageStream, Which
from everdeck.model import Event, EventKind, Layer, LogRoom, ProcessInfo, WorkerSpec, WorkerStatus, worker_name
from everdeck.statedir import StateDir
from everdeck.verbs import (
    RESTARTS_AT_ONCE,
    Abilities,
    Beside,
    Inspection,
    Member,
    Name,
    OpenDeck,
    Run,
    Started,
    Stopped,
    Verbs,
    Workers,
    current_request,
)

ACCEPTED: Final = "a directory of this machine, kubernetes:NAMESPACE, or http(s)://HOST:PORT"
_HERE: Final = "127.0.0.1"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_ELSEWHERE: Final = {
    "kubernetes": ("everdeck.cluster", "ClusterDeck"),
    "http": ("everdeck.remote", "RemoteDeck"),
    "https": ("everdeck.remote", "RemoteDeck"),
}
"""Decks that are not a directory, each made as ``CLASS(where, token=...)``; loaded when one is asked for."""


class AsyncDeck:
    """All workers of one place, from inside an event loop.

    Use it as ``async with AsyncDeck("state") as deck``; leaving stops the bound workers and leaves the adoptable
    ones running. With ``join=False`` a directory that another process owns is refused (:class:`DeckOwned`). ``people``
    are other accounts of this machine that may ask at ``deck.sock`` while this process owns the directory. ``home`` is
    where a daemon of a deck that is elsewhere keeps its own files: tokens, sockets, samples. ``auto_uids`` is the
    range, ``"FIRST-LAST"``, that workers with ``user="auto"`` get their uids from, in all decks of this process.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        join: bool = True,
        token: str | None = None,
        clock: Clock | None = None,
        layers: Iterable[str] = ALL_LAYERS,
        durability: DurabilityMode = "power",
        people: LocalPeople | None = None,
        home: Path | None = None,
        log_room: LogRoom | None = None,
        auto_uids: str | None = None,
    ) -> None:
        if auto_uids is not None:
            rights.use_auto_uids(auto_uids)
        self._elsewhere = _elsewhere(where, token)
        self.where = os.fspath(where)
        self._home = Path(os.path.abspath(self.where if home is None else home))  # noqa: PTH100 - resolve() would follow links
        self._has_home = self._elsewhere is None or home is not None
        self._join = join
        self._clock = clock
        self._layers = frozenset(layers)
        self._durability: DurabilityMode = durability
        self._people = people
        self._log_room = log_room
        self._membership: Membership | None = None
        self._member: MemberDeck | None = None
        self._reopening: asyncio.Task[AsyncDeck] | None = None
        self._opened = False
        self._pid = os.getpid()

    # --- opening and closing ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> Self:
        """Own the directory and recover everything in it, or join who owns it; or reach the deck that is elsewhere."""
        if self._opened and self._pid == os.getpid():
            return self
        if self._membership is not None and self._pid != os.getpid():
            _kept_in_forks.append(self._membership)  # its tasks belong to the parent's loop; nobody may collect them
        self._pid = os.getpid()
        if self._elsewhere is not None:
            await self._elsewhere.open()
        else:
            membership = Membership(
                self._home,
                join=self._join,
                clock=self._clock,
                layers=self._layers,
                durability=self._durability,
                people=self._people,
                log_room=self._log_room,
            )
            await membership.open()
            self._membership, self._member = membership, MemberDeck(membership)
        self._opened = True
        return self

    async def close(self, *, everybody: bool = False) -> None:
        """Leave the deck. An owner finishes the verbs that are being carried out and stops its bound workers.

        Adoptable workers run on, unless ``everybody`` says that they end with us; all stay wanted. Whoever calls a verb
        from now on is refused.
        """
        if self._pid != os.getpid():
            return
        if self._elsewhere is not None:
            await self._elsewhere.close()
        elif self._membership is not None:
            await self._membership.close(everybody=everybody)
        self._opened = False

    @property
    def is_here(self) -> bool:
        """Are its workers' files on this machine?"""
        return self._elsewhere is None

    @property
    def state_dir(self) -> Path:
        """Where everything is kept; of a deck that is elsewhere, what its daemon keeps here."""
        if not self._has_home:
            raise Unsupported("state_dir", f"{self.where} is not a directory of this machine")
        return self._home

    @property
    def deck_id(self) -> str:
        """The random name of this deck, made when it was first opened; a deck elsewhere is known by its place."""
        return self.where if self._elsewhere is not None and self._has_home else self._local().deck_id

    @property
    def owner_pid(self) -> int:
        """The pid that owns the deck; of a deck elsewhere, the daemon's that serves it here."""
        return os.getpid() if self._elsewhere is not None and self._has_home else self._local().owner_pid

    async def _deck(self) -> Verbs:
        """The deck that keeps the verbs; in a forked copy of this process, a member from its first verb on."""
        if self._pid != os.getpid() and self._opened:
            if self._reopening is None or self._reopening.get_loop() is not asyncio.get_running_loop():
                self._reopening = asyncio.get_running_loop().create_task(self.open())
            await asyncio.shield(self._reopening)
        return self._at()

    def _at(self) -> Verbs:
        if self._elsewhere is not None:
            return self._elsewhere
        membership = self._local()
        # What was asked for under an id is asked of ourselves as of another owner: that looks whether it was done.
        if membership.owner is not None and current_request() is None:
            return membership.owner
        assert self._member is not None  # noqa: S101 - made with the membership
        return self._member

    def _local(self) -> Membership:
        if self._elsewhere is not None:
            raise Unsupported("this", f"{self.where} is not a directory of this machine")
        if self._membership is None or (self._pid != os.getpid()):
            raise DeckClosed(f"the deck {self.where} is closed; open it first")
        return self._membership

    # --- verbs, as in everdeck.verbs ----------------------------------------------------------------------------

    async def start(self, name: Name, command: Run = None, *, replace: bool = False, **fields: Any) -> WorkerStatus:
        """Start a worker; return when its program has been exec'ed and recorded."""
        return await (await self._deck()).start(name, command, replace=replace, **fields)

    async def start_many(
        self, workers: Workers, *, replace: bool = False, progress: Started | None = None, **fields: Any
    ) -> builtins.list[WorkerStatus]:
        """Start many: what :meth:`start` promises for each, at a lower price, because they share their commits."""
        return await (await self._deck()).start_many(workers, replace=replace, progress=progress, **fields)

    async def stop(self, name: Name) -> WorkerStatus:
        """Stop a worker; return when its whole tree is proven gone."""
        return await (await self._deck()).stop(name)

    async def stop_many(self, names: Iterable[Name], progress: Stopped | None = None) -> builtins.list[WorkerStatus]:
        """Stop many at once; ``progress`` hears of each one that is gone."""
        return await (await self._deck()).stop_many(names, progress)

    async def stop_all(self) -> builtins.list[WorkerStatus]:
        """Stop every worker of the deck."""
        return await (await self._deck()).stop_all()

    async def restart(self, name: Name) -> WorkerStatus:
        """Stop a worker and start it again with the spec it has."""
        return await (await self._deck()).restart(name)

    async def restart_many(
        self, names: Iterable[Name], *, parallel: int = RESTARTS_AT_ONCE, progress: Started | None = None
    ) -> builtins.list[WorkerStatus]:
        """Restart many, in groups: at most ``parallel`` of them are down at the same time."""
        return await (await self._deck()).restart_many(names, parallel=parallel, progress=progress)

    async def reset(self, name: Name) -> WorkerStatus:
        """Forget a worker's crashes; if it should run and does not, start it now."""
        return await (await self._deck()).reset(name)

    async def remove(self, name: Name, *, data: bool = False) -> None:
        """Stop a worker and remove its record, log, data and secrets; a cluster keeps its volume unless ``data``."""
        await (await self._deck()).remove(name, data=data)

    async def adopt(self, name: Name, pid: int, **fields: Any) -> WorkerStatus:
        """Take over a process that somebody else started, without stopping it."""
        return await (await self._deck()).adopt(name, pid, **fields)

    async def reconcile(self) -> None:
        """Compare every worker with the kernel now and act on differences; rarely needed, deaths are heard at once."""
        await (await self._deck()).reconcile()

    async def status(self, name: Name) -> WorkerStatus:
        """One worker as it is now."""
        return await (await self._deck()).status(name)

    async def list(self) -> builtins.list[WorkerStatus]:
        """Every worker as it is now, by name."""
        return await (await self._deck()).list()

    async def glance(self) -> builtins.list[WorkerStatus]:
        """Every worker by name; its owner leaves out uptime, cpu and memory, so that it costs next to nothing."""
        deck = await self._deck()
        return await (deck.glance() if isinstance(deck, Owner) else deck.list())

    async def usage(self) -> Mapping[str, tuple[float, int]]:
        """Percent of a core and bytes of everybody who runs, as they were a moment ago."""
        deck = await self._deck()
        if isinstance(deck, Owner):
            return await deck.usage()
        return {one.name: (one.cpu_percent or 0.0, one.rss_bytes or 0) for one in await deck.list()}

    async def inspect(self, name: Name) -> Inspection:
        """Everything about one worker."""
        return await (await self._deck()).inspect(name)

    async def spec(self, name: Name) -> WorkerSpec:
        """What a worker runs; the values of its secrets are None."""
        return await (await self._deck()).spec(name)

    async def tree(self, name: Name) -> builtins.list[ProcessInfo]:
        """Every process of a worker's tree."""
        return await (await self._deck()).tree(name)

    async def layers(self, name: Name) -> builtins.list[Layer]:
        """Which of the four layers protect a worker here, and how strongly."""
        return await (await self._deck()).layers(name)

    async def logs(
        self,
        name: Name,
        lines: int | None = 20,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        grep: str | None = None,
    ) -> builtins.list[str]:
        """The last lines of a worker's log (None: all of them), across rotations."""
        return await (await self._deck()).logs(name, lines, since=since, until=until, grep=grep)

    def follow_logs(self, name: Name, lines: int = 0, *, grep: str | None = None) -> AsyncIterator[str]:
        """The last lines of a worker's log, then each new one as it is written."""
        return self._at().follow_logs(name, lines, grep=grep)

    async def events(self, after: int = 0, limit: int | None = None, worker: str | None = None) -> builtins.list[Event]:
        """What happened after an event id, oldest first; durable, so it can be replayed."""
        return await (await self._deck()).events(after, limit, worker)

    async def last_event_id(self) -> int:
        """The id of the newest event, 0 if nothing ever happened."""
        return await (await self._deck()).last_event_id()

    def follow(self, after: int | None = None) -> AsyncIterator[Event]:
        """Each event after an id (None: from now on), then each new one as it happens: in order, each once."""
        return self._at().follow(after)

    def on_event(self, callback: Callable[[Event], Any]) -> Callable[[], None]:
        """Call back for each event from now on; returns what unsubscribes."""
        return self._at().on_event(callback)

    def messages(self, name: Name | None = None, *, run: Callable[[Any], Any] | None = None) -> MessageStream:
        """What comes in by a satellite (None: by all of them): ``async for message in deck.messages(): …``.

        Each message is handed to one reader of all programs that read. Messages of one conversation come one after
        another, in order. A reader that dies leaves its message for the next.
        """
        return self._at().messages(name, run=run)

    async def send(
        self,
        name: Name,
        *,
        to: str | int,
        text: str = "",
        subject: str | None = None,
        attachments: Sequence[str | os.PathLike[str]] = (),
        **options: Any,
    ) -> int:
        """Send a message by a satellite; returns its number once it is on disk. The satellite sends it and retries."""
        deck = await self._deck()
        return await deck.send(name, to=to, text=text, subject=subject, attachments=attachments, **options)

    async def feed(self, name: Name) -> FeedStatus:
        """A satellite's feed: account, connection, what waits, is in flight, done, set aside, to be sent."""
        return await (await self._deck()).feed(name)

    async def letters(
        self, name: Name, *, which: Which = "dead", number: str | None = None, limit: int = 100
    ) -> builtins.list[Letter]:
        """What is in a satellite's feed: set aside (``dead``), ``waiting``, ``done``, or ``all`` that is not done."""
        return await (await self._deck()).letters(name, which=which, number=number, limit=limit)

    async def decide(self, name: Name, verb: LetterVerb, number: str) -> bool:
        """``retry`` or ``drop`` a dead letter, or ``replay`` a done message; False if there is none of that number."""
        return await (await self._deck()).decide(name, verb, number)

    async def abilities(self) -> Abilities:
        """What this deck can do, and which verbs it cannot keep."""
        return await (await self._deck()).abilities()

    async def members(self) -> builtins.list[Member]:
        """Every process that has the deck open, its owner first."""
        return await (await self._deck()).members()

    # --- for those who build a daemon around it -----------------------------------------------------------------

    async def whole_spec(self, name: Name) -> WorkerSpec:
        """What a worker runs, with the values of its secrets."""
        if self._elsewhere is not None:
            return await self._beside("whole_spec").whole_spec(name)
        spec = await self.spec(name)
        folder = StateDir(self._home).worker(worker_name(name)).secrets
        return await asyncio.to_thread(_with_secrets, spec, folder) if spec.secrets else spec

    async def applied(self) -> bytes | None:
        """What the last configuration left to be remembered; None if there was none."""
        if self._elsewhere is not None:
            return await self._beside("applied").applied()
        try:
            return await asyncio.to_thread(StateDir(self._home).applied.read_bytes)
        except FileNotFoundError:
            return None

    async def remember_applied(self, memory: bytes) -> None:
        """Keep that for the next one."""
        if self._elsewhere is not None:
            await self._beside("applied").remember_applied(memory)
        else:
            await asyncio.to_thread(disk.replace_file, StateDir(self._home).applied, memory)

    def configure(self, told: Mapping[str, Any]) -> None:
        """What a configuration file says about this kind of deck; one box keeps to its own settings."""
        if self._elsewhere is not None:
            self._beside("configure").configure(told)

    def _beside(self, what: str) -> Beside:
        if not isinstance(self._elsewhere, Beside):
            raise Unsupported(what, f"{self.where} tells it to nobody; ask its daemon to apply")
        return self._elsewhere

    async def was_removed(self, name: Name) -> bool:
        """Did the request that is being carried out remove this worker before? Asked again, it is answered as done."""
        deck = await self._deck()
        return isinstance(deck, Owner | MemberDeck) and await deck.was_removed(name)

    async def record_event(self, worker: str | None, kind: EventKind, detail: dict[str, Any]) -> Event:
        """Add an event of somebody else's to the stream, for example a feed's."""
        await self._deck()
        owner, member = self._local().owner, self._member
        if owner is None and member is not None:
            return await member.record_event(worker, kind, detail)
        assert owner is not None  # noqa: S101 - one of the two is there
        return await owner.record_event(worker, kind, detail)

    async def address(self, name: Name) -> str:
        """The host at which a worker's port is reached: this machine, the daemon's, or the worker's own pod."""
        if self._elsewhere is None:
            return _HERE
        if not hasattr(self._elsewhere, "address"):
            raise Unsupported("address", f"{self.where} does not tell where its workers are")
        return str(await self._elsewhere.address(name))

    async def crash_times(self, name: Name) -> builtins.list[float]:
        """When a worker crashed within its window, as seconds since the epoch."""
        return [at.timestamp() for at in (await self.inspect(name)).crash_times]

    def log_dir(self, name: Name) -> Path:
        """Where a worker's log files are."""
        owner = self._local().owner
        return StateDir(self._home).worker(worker_name(name)).log if owner is None else owner.log_dir(name)

    def prepare_reexec(self) -> dict[str, str]:
        """Make what must survive an exec in place inheritable; returns the environment that tells the next image."""
        owner = self._local().owner
        return {} if owner is None else owner.prepare_reexec()

    def forget_in_fork(self) -> None:
        """In a forked copy: let go of everything whose copy would speak for this process."""
        membership = self._local()
        membership.forget_in_fork()
        if membership.owner is not None:
            membership.owner.forget_in_fork()


def _with_secrets(spec: WorkerSpec, folder: Path) -> WorkerSpec:
    """The same spec with the values that are on disk; None for one that cannot be read."""
    known = {}
    for name, secret in spec.secrets.items():
        value = None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            value = credentials.read(folder, name).decode()
        known[name] = msgspec.structs.replace(secret, value=value)
    return msgspec.structs.replace(spec, secrets=known)


def _elsewhere(where: object, token: str | None) -> OpenDeck | None:
    """The deck at a place that is not a directory of this machine; None for a directory."""
    if isinstance(where, os.PathLike):
        return None
    if not isinstance(where, str) or not where:
        raise SpecError("where", where, ACCEPTED)
    scheme = _SCHEME.match(where)
    if scheme is None:
        return None
    kind = scheme[1].lower()
    if kind not in _ELSEWHERE:
        raise SpecError("where", where, f"{ACCEPTED} (for a directory of that name: ./{where})")
    module, name = _ELSEWHERE[kind]
    try:
        found = getattr(import_module(module), name)
    except ModuleNotFoundError as err:
        if err.name != module:
            raise Unsupported("open", f"{where} needs the package {err.name}, which is not installed") from err
        raise Unsupported("open", f"{where} needs {module}, which this installation does not have") from err
    deck: OpenDeck = found(where, token=token)
    return deck


_kept_in_forks: builtins.list[Membership] = []

if TYPE_CHECKING:  # mypy proves that the deck keeps the contract

    def _keeps_the_contract(deck: AsyncDeck) -> Verbs:
        return deck

"""One process's part in a state directory: it owns the deck, or it is a member and asks the owner.

The kernel elects: whoever gets ``deck.lock`` owns the deck. A member keeps one connection to the owner and waits for
nothing else, so it costs no wake-up; the end of that connection is the signal that the owner ended, and then every
member tries for the lock. One gets it, recovers the deck and serves it; the others find it already listening, because
an owner listens before it recovers; in the moment between the two they wait for a fact
(:mod:`everdeck.kernel.vacancy`).

A verb that was under way is asked again, of the new owner, with the same request id (:mod:`everdeck.deck.deeds`): its
caller only waits longer.
"""

import asyncio
import contextlib
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from everdeck.access import LocalPeople
from everdeck.clock import Clock
from everdeck.crashpoints import crash_point
from everdeck.deck.durability import DurabilityMode
from everdeck.deck.owner import Owner
from everdeck.errors import DeckClosed, DeckOwned, EverdeckError
from everdeck.kernel import descriptors
from everdeck.kernel import identity as ids
from everdeck.kernel.vacancy import Vacancy
from everdeck.model import LogRoom
from everdeck.verbs import current_caller, request_id
from everdeck.wire import handover
from everdeck.wire.frames import VERSION, Welcome, raw
from everdeck.wire.line import Line, LineLost
from everdeck.wire.requests import Verb, Wakes

_log: Final = logging.getLogger("everdeck.deck")

_PATIENCE_SECONDS: Final = 30.0
"""How long opening waits for an owner that holds the lock and says nothing."""
_TROUBLE_SECONDS: Final = 1.0
_Answer = TypeVar("_Answer")


class Membership:
    """What this process is to one directory, for as long as it has it open."""

    def __init__(
        self,
        state_dir: Path,
        *,
        join: bool,
        clock: Clock | None,
        layers: frozenset[str],
        durability: DurabilityMode,
        people: LocalPeople | None = None,
        log_room: LogRoom | None = None,
    ) -> None:
        self.state_dir = state_dir
        self.owner: Owner | None = None
        self.line: Line | None = None
        self._welcome = Welcome(VERSION, 0, "", "")
        self._join = join
        self._clock = clock
        self._layers = layers
        self._durability: DurabilityMode = durability
        self._people = people
        self._log_room = log_room
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False
        self._taking = False
        self._fetching: asyncio.Future[handover.Given | None] | None = None
        self._put_away: asyncio.Future[None] | None = None
        self._bells: set[Callable[[], None]] = set()
        self._ringing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Own the directory, or reach its owner."""
        _open_memberships.add(self)
        descriptors.grow(descriptors.MANY)  # now, and not on the way of a takeover
        try:
            await self._settle(asyncio.get_running_loop().time() + _PATIENCE_SECONDS)
        except TimeoutError:
            raise DeckOwned(str(self.state_dir), _pid_of_owner(self.state_dir)) from None
        if self.owner is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def close(self, *, everybody: bool = False) -> None:
        """Let go of the directory; an owner stops its bound workers, or everybody."""
        self._closed = True
        _open_memberships.discard(self)
        self._changed.set()
        for task in (self._keeping, self._ringing):
            if task is not None:
                if task is not self._keeping or not self._taking:  # what was begun with the deck's lock is finished
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._put_away is not None:
            await self._put_away
        if self.line is not None:
            self.line.hang_up()
        if self.owner is None and self._fetching is not None:
            # The deck was offered, and may be ours by now: then it is ours to close.
            handed_on = await self._fetching
            if handed_on is not None:
                self.owner = await self._own(handed_on)
        if self.owner is not None:
            await self.owner.close(everybody=everybody)
        self._ring()

    @property
    def owner_pid(self) -> int:
        """Who owns the deck now, or did when it was last asked."""
        return self.owner.owner_pid if self.owner is not None else self._welcome.owner_pid

    @property
    def deck_id(self) -> str:
        """The random name of this deck."""
        return self.owner.deck_id if self.owner is not None else self._welcome.deck_id

    @property
    def is_closed(self) -> bool:
        """Was it closed?"""
        return self._closed

    def forget_in_fork(self) -> None:
        """In a forked copy: nothing of this is ours; the loop, its tasks and what they hold are the parent's."""
        if self.line is not None:
            self.line.forget_in_fork()

    async def ask(self, verb: Verb[_Answer], tell: Callable[[Any], None] | None = None) -> _Answer:
        """The owner's answer, whoever owns the deck by then."""
        request = None if verb.deed is None else request_id(raw(verb)) or os.urandom(16).hex()
        while True:
            if self._closed:
                raise DeckClosed(f"the deck {self.state_dir} is closed; open it first")
            if self.owner is not None:
                return await self.owner.carry_out(verb, request, tell or _nobody)
            if self.line is not None:
                with contextlib.suppress(LineLost):
                    return await self.line.ask(verb, request=request, caller=current_caller(), tell=tell)
            await self._other_than(self.line)

    async def _other_than(self, line: Line | None) -> None:
        """Wait until there is an owner to ask that is not the one at the end of this line."""
        while self.owner is None and not self._closed and (self.line is None or self.line is line):
            self._changed.clear()
            await self._changed.wait()

    # --- events, read from the disk; wake-ups come over the wire ------------------------------------------------

    def on_wake(self, bell: Callable[[], None]) -> Callable[[], None]:
        """Ring whenever there may be new events; returns what ends it."""
        self._bells.add(bell)
        if self._ringing is None:
            self._ringing = asyncio.get_running_loop().create_task(self._keep_ringing())

        def end() -> None:
            self._bells.discard(bell)

        return end

    async def _keep_ringing(self) -> None:
        while not self._closed:
            with contextlib.suppress(LineLost, DeckClosed):
                async with contextlib.aclosing(self._wakes()) as wakes:
                    async for _ in wakes:
                        self._ring()
            self._ring()
            if self.owner is None:
                await self._other_than(self.line if self.line is None or self.line.lost.done() else None)

    async def _wakes(self) -> AsyncGenerator[int, None]:
        if self.owner is not None:
            async for wake in self.owner.wakes():
                yield wake
        elif self.line is not None:
            async for wake in self.line.stream(Wakes()):
                yield wake

    def _ring(self) -> None:
        for bell in list(self._bells):
            bell()

    # --- owner or member ----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """While somebody else owns the deck: when that ends, own it, or reach who does."""
        while self.owner is None and not self._closed:
            if self.line is not None:
                await asyncio.shield(self.line.lost)
                self.line = None
            try:
                await self._settle()
            except (EverdeckError, OSError):
                _log.exception("%s: the owner ended, and its place cannot be taken; trying again", self.state_dir)
                await _pause(_TROUBLE_SECONDS)

    async def _own(self, handed_on: handover.Given | None) -> Owner:
        crash_point("takeover.begin")
        return await Owner.open(
            self.state_dir,
            clock=self._clock,
            layers=self._layers,
            durability=self._durability,
            handed_on=handed_on,
            name_owner=not self._join,
            people=self._people,
            log_room=self._log_room,
        )

    def _offered(self, word: str) -> None:
        """The owner leaves and we may have the deck: fetch it, and own it when the line ends."""
        if not self._closed and self._fetching is None:
            loop = asyncio.get_running_loop()
            self._fetching = loop.run_in_executor(None, handover.fetch, self.state_dir, word)

    async def _settle(self, give_up_at: float | None = None) -> None:
        """Become the owner, or a member of somebody who answers; who owns it takes as long as its recovery does."""
        vacancy: Vacancy | None = None
        try:
            while not self._closed and not await self._owned_or_reached(give_up_at):
                # Somebody has the lock and does not listen: it is on its way in or out.
                if vacancy is None:
                    vacancy = Vacancy(self.state_dir)  # and look once more: from now on it is heard
                else:
                    async with asyncio.timeout_at(give_up_at):
                        await _told(vacancy)
        finally:
            self._changed.set()
            if vacancy is not None:  # whoever asks now need not wait until the kernel has let go of it
                self._put_away = asyncio.get_running_loop().run_in_executor(None, vacancy.close)

    async def _owned_or_reached(self, give_up_at: float | None) -> bool:
        handed_on = None if self._fetching is None else await asyncio.shield(self._fetching)
        self._fetching = None
        try:
            self._taking = True
            self.owner = await self._own(handed_on)
        except DeckOwned:
            if not self._join:
                raise
        else:
            return True
        finally:
            self._taking = False
        with contextlib.suppress(OSError, LineLost):
            async with asyncio.timeout_at(give_up_at):
                line = await Line.reach(self.state_dir, _program(), member=True, offered=self._offered)
                self.line, self._welcome = line, line.welcomed.result()
                return True
        return False


async def _told(vacancy: Vacancy) -> None:
    """Wait for one of the facts."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    with vacancy.facts() as facts:
        for fd in facts.descriptors:
            loop.add_reader(fd, told.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), facts.seconds)
        finally:
            for fd in facts.descriptors:
                loop.remove_reader(fd)


def _program() -> str:
    return ids.command_line(os.getpid())


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - only where no fact can be waited for; see the callers


def _pid_of_owner(state_dir: Path) -> int | None:
    from everdeck.deck.home import owner_pid  # noqa: PLC0415 - for an error that hardly ever comes

    return owner_pid(state_dir)


def _nobody(_: Any) -> None:
    """Nobody asked for progress."""


_open_memberships: "weakref.WeakSet[Membership]" = weakref.WeakSet()


def _forget_memberships_in_forked_child() -> None:
    for membership in list(_open_memberships):
        membership.forget_in_fork()
    _open_memberships.clear()


os.register_at_fork(after_in_child=_forget_memberships_in_forked_child)

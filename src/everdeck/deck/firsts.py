"""First starts in one call: those of workers that have no home yet and ask for nothing special.

The C side makes the home, lock, note, log, cgroup and process of several such workers without the interpreter
(:class:`everdeck.kernel.native.FirstStarts`). The calls are made by threads beside the loop, so everybody else has the
loop meanwhile; a start that is alone is called in the loop, where it costs nobody a hand-over, and its record is made
while its program is exec'ed. What one call cannot start, and whatever goes wrong with a home, is left to the steps of
:mod:`everdeck.deck.starting`, which tell why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from everdeck.crashpoints import crash_point, visited, visits_left
from everdeck.deck import notes, reaching
from everdeck.deck.outcomes import Launch, Outcomes, last_end
from everdeck.deck.parts import Parts, Unborn
from everdeck.errors import EverdeckError
from everdeck.kernel import native, spawn
from everdeck.logs import files as logfiles
from everdeck.logs.keeper import Armed

if TYPE_CHECKING:
    import asyncio

_IN_ONE_CALL: Final = 32
"""How many first starts one call makes: each waits for the last of them, and a call is what the midwives are given."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Some first starts that one call makes."""

    orders: Sequence[Launch]
    firsts: Sequence[native.First]
    starts: spawn.FirstStarts
    over: "asyncio.Future[None] | None"
    """None: it is called here."""


class Firsts:
    """Starts those that have no home yet, some in each call."""

    def __init__(self, parts: Parts, outcomes: Outcomes) -> None:
        self._parts = parts
        self._outcomes = outcomes

    async def launch(self, orders: Sequence[Launch], *, alone: bool) -> BaseException | None:
        """Start them; others have the loop while the midwives are at work. Tells if we were cancelled meanwhile.

        Those that one call cannot start are left as they are.
        """
        interrupted: BaseException | None = None
        calls: list[_Call] = []
        locked, deadly = 0, visits_left("start.locked")
        for begin in range(0, len(orders), _IN_ONE_CALL):
            some = [order for order in orders[begin : begin + _IN_ONE_CALL] if await self._is_reached(order)]
            call = self._begun(some, alone=alone, die_locked=max(deadly - locked, 0))
            if call is not None:
                calls.append(call)
                locked += len(call.orders)
        for call in calls:
            if call.over is None:
                await self._launch_alone(call)
                continue
            interrupted = await self._parts.midwives.outlasted(call.over) or interrupted
            visited("start.locked", len(call.orders))
            await self._outcomes.settle(self._taken(call))
            self._end(call)
        return interrupted

    async def _launch_alone(self, call: _Call) -> None:
        """While its program is exec'ed its record is made, and committed when that is over."""
        starts = call.starts
        try:
            starts.begin()
            visited("start.locked", 1)
            spawned = self._taken(call, partial(self._exec_over, call))
            await self._outcomes.settle(spawned)
        finally:
            starts.end()

    def _exec_over(self, call: _Call) -> None:
        call.starts.end()
        (order,), (first,), (made,) = call.orders, call.firsts, call.starts.told()
        if made.step >= 0:
            order.launched = None
            self._parts.engine.first_launched(first, made)  # raises why
        crash_point("start.spawned")

    def _begun(self, orders: Sequence[Launch], *, alone: bool, die_locked: int) -> _Call | None:
        """A call that starts these; None if there is nobody whom a call can start."""
        parts, described = self._parts, self._described(orders)
        if not described:
            return None
        firsts = [first for _, first in described]
        try:
            starts = parts.engine.first_starts(firsts, inotify_fd=parts.logs.inotify_fd, die_locked=die_locked)
        except (native.Refused, OSError, ValueError):  # the steps say what is wrong with it
            return None
        if not alone:  # others have the loop meanwhile, and may hear from them
            for first in firsts:
                parts.unborn[first.name] = Unborn(first.cgroup or None)
            parts.logs.expect(len(firsts))
        starts.make_ready()
        over = None if alone else parts.midwives.begin(starts.call)
        return _Call([order for order, _ in described], firsts, starts, over)

    def _end(self, call: _Call) -> None:
        """Whoever was started is known: what was heard of them meanwhile counts now."""
        parts = self._parts
        parts.logs.expect(-len(call.firsts))
        for order in call.orders:
            unborn = parts.unborn.pop(order.worker.name, None)
            if unborn is not None and unborn.said and order.failure is None:
                parts.heard_early(order.worker.name, unborn.said)

    async def _is_reached(self, order: Launch) -> bool:
        """Does what it runs lie on this machine? False also if nobody answers, which is its failure."""
        spec = order.spec
        paths = reaching.to_ask_about(spec.command, spec.cwd) if spec.command else []
        if reaching.known_near(paths):
            return True
        try:
            return await reaching.reached(paths, spec.command[0])
        except BaseException as err:  # noqa: BLE001 - told through the order
            order.failure = err
            self._outcomes.back_to_rest(order)
            return False

    def _described(self, orders: Sequence[Launch]) -> list[tuple[Launch, native.First]]:
        """Those that can be started in a call, as it needs them; the others have failed."""
        described: list[tuple[Launch, native.First]] = []
        first, at = self._parts.engine.first, logfiles.time_of_mark()
        for order in orders:
            worker = order.worker
            intent = worker.record
            try:
                note = notes.content(intent.cookie, intent.spec_json)
                ended = last_end(worker, order.before)
                described.append((order, first(intent.name, order.spec, intent.cookie, intent.port, note, ended, at)))
            except BaseException as err:  # noqa: BLE001 - told through the order
                order.failure = err
                self._outcomes.back_to_rest(order)
        return described

    def _taken(self, call: _Call, exec_over: Callable[[], None] | None = None) -> list[Launch]:
        """Those that were spawned; those that were refused go back to rest, and those that need steps are left.

        ``exec_over`` is of one whose program is still being exec'ed: see :attr:`Launch.exec_over`.
        """
        spawned: list[Launch] = []
        try:
            told = call.starts.told()
        except native.Refused:  # nothing was begun
            return spawned
        for order, first, made in zip(call.orders, call.firsts, told, strict=True):
            if made.step >= 0 and not spawn.is_refusal(made):
                continue
            try:
                order.launched, order.identity = self._parts.engine.first_launched(first, made)
                if made.watch >= 0:
                    order.armed = Armed(made.watch, len(first.mark))
                if exec_over is None:
                    crash_point("start.spawned")
                elif order.identity is None:  # to be asked for, which waits for the exec as well
                    exec_over()
                else:
                    order.exec_over = exec_over
                spawned.append(order)
            except EverdeckError as err:
                order.failure = err
                self._outcomes.back_to_rest(order)
        return spawned

"""Everdeck: one long-lived process per user on one box.

The public names are loaded when they are first used (PEP 562), so that a worker which imports only
``everdeck.child`` loads neither asyncio nor sqlite3 nor the deck.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AsyncDeck": "everdeck.deck",
    "Deck": "everdeck.deck",
    "open": "everdeck.deck.facade",
    "Containment": "everdeck.model",
    "Event": "everdeck.model",
    "EventKind": "everdeck.model",
    "Exited": "everdeck.model",
    "Health": "everdeck.model",
    "Killed": "everdeck.model",
    "Limits": "everdeck.model",
    "Log": "everdeck.model",
    "LogRoom": "everdeck.model",
    "Attachment": "everdeck.messages",
    "Message": "everdeck.messages",
    "Outgoing": "everdeck.messages",
    "Satellite": "everdeck.satellites",
    "SatelliteSpec": "everdeck.model",
    "Restart": "everdeck.model",
    "Secret": "everdeck.model",
    "State": "everdeck.model",
    "Stop": "everdeck.model",
    "UnknownExit": "everdeck.model",
    "WorkerSpec": "everdeck.model",
    "WorkerStatus": "everdeck.model",
    "EverdeckError": "everdeck.errors",
    "SpecError": "everdeck.errors",
    "NameRefused": "everdeck.errors",
    "LimitUnavailable": "everdeck.errors",
    "SpecChanged": "everdeck.errors",
    "UnknownWorker": "everdeck.errors",
    "LockConflict": "everdeck.errors",
    "StopFailed": "everdeck.errors",
    "WorkerFailed": "everdeck.errors",
    "DeckOwned": "everdeck.errors",
    "DeckClosed": "everdeck.errors",
    "MessageError": "everdeck.errors",
    "MessageLost": "everdeck.errors",
    "SendRefused": "everdeck.errors",
    "Unsupported": "everdeck.errors",
    "Abilities": "everdeck.verbs",
    "Inspection": "everdeck.verbs",
    "Member": "everdeck.verbs",
    "Verbs": "everdeck.verbs",
}

if TYPE_CHECKING:
    from everdeck.deck import AsyncDeck as AsyncDeck, Deck as Deck
    from everdeck.deck.facade import open as open  # noqa: A004 - said as everdeck.open
    from everdeck.errors import (
        DeckClosed as DeckClosed,
        DeckOwned as DeckOwned,
        LimitUnavailable as LimitUnavailable,
        LockConflict as LockConflict,
        MessageError as MessageError,
        MessageLost as MessageLost,
        SendRefused as SendRefused,
        NameRefused as NameRefused,
        SpecChanged as SpecChanged,
        SpecError as SpecError,
        StopFailed as StopFailed,
        EverdeckError as EverdeckError,
        UnknownWorker as UnknownWorker,
        Unsupported as Unsupported,
        WorkerFailed as WorkerFailed,
    )
    from everdeck.messages import Attachment as Attachment, Message as Message, Outgoing as Outgoing
    from everdeck.satellites import Satellite as Satellite
    from everdeck.model import (
        Containment as Containment,
        Event as Event,
        EventKind as EventKind,
        Exited as Exited,
        Health as Health,
        Killed as Killed,
        Limits as Limits,
        Log as Log,
        LogRoom as LogRoom,
        Restart as Restart,
        SatelliteSpec as SatelliteSpec,
        Secret as Secret,
        State as State,
        Stop as Stop,
        UnknownExit as UnknownExit,
        WorkerSpec as WorkerSpec,
        WorkerStatus as WorkerStatus,
    )
    from everdeck.verbs import (
        Abilities as Abilities,
        Inspection as Inspection,
        Member as Member,
        Verbs as Verbs,
    )

# The names are the table above, written once; `open` is said as everdeck.open and must not hide the builtin.
__all__ = ["__version__", *sorted(set(_HOME) - {"open"})]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'everdeck' has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

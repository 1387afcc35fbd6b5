"""Tidelock: one long-lived process per user on one box.

The public names are loaded when they are first used (PEP 562), so that a worker which imports only
``tidelock.child`` loads neither asyncio nor sqlite3 nor the deck.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AsyncDeck": "tidelock.deck",
    "Deck": "tidelock.deck",
    "Containment": "tidelock.model",
    "Event": "tidelock.model",
    "EventKind": "tidelock.model",
    "Exited": "tidelock.model",
    "Health": "tidelock.model",
    "Killed": "tidelock.model",
    "Limits": "tidelock.model",
    "Log": "tidelock.model",
    "Restart": "tidelock.model",
    "Secret": "tidelock.model",
    "State": "tidelock.model",
    "Stop": "tidelock.model",
    "UnknownExit": "tidelock.model",
    "WorkerSpec": "tidelock.model",
    "WorkerStatus": "tidelock.model",
    "TidelockError": "tidelock.errors",
    "SpecError": "tidelock.errors",
    "NameRefused": "tidelock.errors",
    "LimitUnavailable": "tidelock.errors",
    "SpecChanged": "tidelock.errors",
    "UnknownWorker": "tidelock.errors",
    "LockConflict": "tidelock.errors",
    "StopFailed": "tidelock.errors",
    "WorkerFailed": "tidelock.errors",
    "DeckOwned": "tidelock.errors",
    "DeckClosed": "tidelock.errors",
}

if TYPE_CHECKING:
    from tidelock.deck import AsyncDeck as AsyncDeck, Deck as Deck
    from tidelock.errors import (
        DeckClosed as DeckClosed,
        DeckOwned as DeckOwned,
        LimitUnavailable as LimitUnavailable,
        LockConflict as LockConflict,
        NameRefused as NameRefused,
        SpecChanged as SpecChanged,
        SpecError as SpecError,
        StopFailed as StopFailed,
        TidelockError as TidelockError,
        UnknownWorker as UnknownWorker,
        WorkerFailed as WorkerFailed,
    )
    from tidelock.model import (
        Containment as Containment,
        Event as Event,
        EventKind as EventKind,
        Exited as Exited,
        Health as Health,
        Killed as Killed,
        Limits as Limits,
        Log as Log,
        Restart as Restart,
        Secret as Secret,
        State as State,
        Stop as Stop,
        UnknownExit as UnknownExit,
        WorkerSpec as WorkerSpec,
        WorkerStatus as WorkerStatus,
    )

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - the names are the table above, written once


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'tidelock' has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

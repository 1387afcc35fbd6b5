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
    from tidelock.deck import AsyncDeck as AsyncDeck
    from tidelock.deck import Deck as Deck
    from tidelock.errors import (
        DeckClosed as DeckClosed,
    )
    from tidelock.errors import (
        DeckOwned as DeckOwned,
    )
    from tidelock.errors import (
        LimitUnavailable as LimitUnavailable,
    )
    from tidelock.errors import (
        LockConflict as LockConflict,
    )
    from tidelock.errors import (
        NameRefused as NameRefused,
    )
    from tidelock.errors import (
        SpecChanged as SpecChanged,
    )
    from tidelock.errors import (
        SpecError as SpecError,
    )
    from tidelock.errors import (
        StopFailed as StopFailed,
    )
    from tidelock.errors import (
        TidelockError as TidelockError,
    )
    from tidelock.errors import (
        UnknownWorker as UnknownWorker,
        WorkerFailed as WorkerFailed,
    )
    from tidelock.model import (
        Containment as Containment,
    )
    from tidelock.model import (
        Event as Event,
    )
    from tidelock.model import (
        EventKind as EventKind,
    )
    from tidelock.model import (
        Exited as Exited,
    )
    from tidelock.model import (
        Health as Health,
    )
    from tidelock.model import (
        Killed as Killed,
    )
    from tidelock.model import (
        Limits as Limits,
    )
    from tidelock.model import (
        Log as Log,
    )
    from tidelock.model import (
        Restart as Restart,
    )
    from tidelock.model import (
        Secret as Secret,
    )
    from tidelock.model import (
        State as State,
    )
    from tidelock.model import (
        Stop as Stop,
    )
    from tidelock.model import (
        UnknownExit as UnknownExit,
    )
    from tidelock.model import (
        WorkerSpec as WorkerSpec,
    )
    from tidelock.model import (
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

"""The deck: all workers of one state directory, and the verbs on them.

Loaded when first used: a look at a deck without owning it (:mod:`everdeck.deck.peek`) needs neither asyncio nor the
verbs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everdeck.deck.deck import AsyncDeck
    from everdeck.deck.facade import Deck

__all__ = ["AsyncDeck", "Deck"]


def __getattr__(name: str) -> Any:
    if name == "AsyncDeck":
        from everdeck.deck.deck import AsyncDeck  # noqa: PLC0415 - the point of this function

        return AsyncDeck
    if name == "Deck":
        from everdeck.deck.facade import Deck  # noqa: PLC0415 - as above

        return Deck
    raise AttributeError(f"module 'everdeck.deck' has no attribute {name!r}")

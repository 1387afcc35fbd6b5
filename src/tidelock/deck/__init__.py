"""The deck: all workers of one state directory, and the verbs on them."""

from tidelock.deck.deck import AsyncDeck
from tidelock.deck.facade import Deck

__all__ = ["AsyncDeck", "Deck"]

"""The front of a deck over HTTP: the API, its streams, its metrics, the page, and the daemon that serves them.

Everything here is a thin layer on :class:`everdeck.deck.AsyncDeck`, in the same event loop and the same process.
"""

from typing import Final

from everdeck.server import later

TYPED_IN_ENV: Final = "EVERDECK_TYPED_IN"
"""Where the command was typed: a daemon starts in / and goes there once everything it is made of is loaded."""

later.put_off()

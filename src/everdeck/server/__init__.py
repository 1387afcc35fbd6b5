"""The front of a deck over HTTP: the API, its streams, its metrics, the page, and the daemon that serves them.

Everything here is a thin layer on :class:`everdeck.deck.AsyncDeck`, in the same event loop and the same process.
"""

"""``/api/v1``: every verb of the deck over HTTP.

Handlers are thin: they read what was asked, call one verb of the deck and give back its value. Errors of the tree
become problem documents in one place (:mod:`everdeck.server.problems`). Verbs are idempotent as the deck's are: a stop
of a stopped worker is its status.

A file per resource; :mod:`everdeck.server.api.asking` has what they share.
"""

from typing import Final

from litestar.handlers import HTTPRouteHandler

from everdeck.server.api import deck, events, logs, many, messages, workers

HANDLERS: Final[list[HTTPRouteHandler]] = [
    *workers.HANDLERS,
    *many.HANDLERS,
    *logs.HANDLERS,
    *events.HANDLERS,
    *messages.HANDLERS,
    *deck.HANDLERS,
]

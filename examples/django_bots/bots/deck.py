"""The deck of this process. Every process of the site has it open; one of them owns it, the others ask that one."""

import sys
from functools import cache

from django.conf import settings

from everdeck import Deck, WorkerStatus

BOT = [sys.executable, "-c", "import signal; print('hello', flush=True); signal.pause()"]


@cache
def deck() -> Deck:
    return Deck(settings.BOTS_STATE)


def start(user: str) -> WorkerStatus:
    return deck().start(user, BOT, env={"BOT_USER": user})

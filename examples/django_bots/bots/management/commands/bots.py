"""``manage.py bots``: the bots from a terminal, from cron and from a service."""

import signal
from argparse import ArgumentParser

from bots.deck import deck, start
from django.core.management.base import BaseCommand, CommandError

from everdeck import Event, EverdeckError


class Command(BaseCommand):
    """List, start and stop bots, or keep them."""

    help = "list: show every bot. start, stop: one user's. keep: own the deck until SIGTERM, and tell what happens."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("verb", choices=["list", "start", "stop", "keep"])
        parser.add_argument("user", nargs="?")

    def handle(self, *_: object, verb: str, user: str | None, **__: object) -> None:
        if verb in {"start", "stop"} and user is None:
            raise CommandError(f"{verb} whose bot? manage.py bots {verb} USER")
        try:
            if verb == "keep":
                self.keep()
            elif user is not None:
                start(user) if verb == "start" else deck().stop(user)
        except EverdeckError as error:
            raise CommandError(str(error)) from error
        for status in deck().list():
            self.stdout.write(f"{status.name} {status.state} {status.pid or '-'}")

    def keep(self) -> None:
        """Until somebody asks us to leave; the bots stay."""

        def told(event: Event) -> None:
            self.stdout.write(f"{event.kind} {event.worker or ''}")

        deck().on_event(told)
        self.stdout.write(f"keeping {len(deck().list())} bots")
        signal.sigwait({signal.SIGTERM, signal.SIGINT})

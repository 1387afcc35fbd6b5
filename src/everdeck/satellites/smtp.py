"""The kind ``smtp``: an outbox that is sent.

Nothing comes in. What ``deck.send`` and ``everdeck send`` put into the outbox is sent in order per recipient; a server
that is away or says 4xx is tried again for days (``give_up_days``), 5xx sets the message aside and is told.
"""

from typing import Final

from everdeck.feed.policy import Retry
from everdeck.messages import Outgoing
from everdeck.satellites import SmtpOptions
from everdeck.satellites.base import Context, Kind
from everdeck.satellites.mailing import SmtpError, SmtpSender, composed, tell_refused

RETRY_CAP_SECONDS: Final = 1800.0
FIRST_ATTEMPTS: Final = 10
DAY_SECONDS: Final = 86_400.0


class Smtp(Kind[SmtpOptions]):
    """One account at an SMTP server."""

    retry = Retry(2.0, RETRY_CAP_SECONDS)

    def __init__(self, options: SmtpOptions, context: Context) -> None:
        super().__init__(options, context)
        self.name = f"smtp:{options.user or options.sender}@{options.host}"
        self.max_attempts = FIRST_ATTEMPTS + round(options.give_up_days * DAY_SECONDS / RETRY_CAP_SECONDS)
        self._from = options.sender or options.user or ""
        self._sender = SmtpSender(
            host=options.host,
            port=options.port,
            tls=options.tls,
            user=options.user,
            password=context.secret("PASSWORD"),
        )

    async def close(self) -> None:
        """See :class:`Kind`."""
        await self._sender.close()

    async def check(self) -> None:
        """See :class:`Kind`."""
        await self._sender.check()
        self.context.connected(account=f"{self._from} via {self._sender.where}")

    async def send(self, outgoing: Outgoing) -> None:
        """See :class:`Kind`."""
        mail = composed(outgoing, self._from)
        try:
            refused = await self._sender.send(mail)
        except SmtpError as err:
            self.context.failing(str(err))
            raise
        self.context.connected(account=f"{self._from} via {self._sender.where}")
        tell_refused(self.context.tell, refused)

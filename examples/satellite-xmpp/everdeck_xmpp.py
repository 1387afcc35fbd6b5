"""A kind of satellite that Everdeck does not bring: an XMPP account, in two methods.

The server's message archive (XEP-0313) is asked for what came after the last id that was stored, so nothing is lost
while the satellite is away; a live message is only a hint that there is something in the archive. A message has reached
the server when the server answers a ping that was sent behind it: a stream is in order (RFC 6120).

    everdeck start bob --satellite xmpp --option jid=bob@example.org --secret PASSWORD=bob.password
"""

import asyncio

import msgspec
from slixmpp import ClientXMPP

from everdeck.errors import MessageError
from everdeck.feed.records import Position
from everdeck.messages import Incoming, Outgoing
from everdeck.satellites import KindEntry
from everdeck.satellites.base import Arrived, Context, Kind

PAGE = 50
SECONDS = 30


class XmppOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the kind ``xmpp``."""

    jid: str
    host: str | None = None
    port: int = 5222
    tls: bool = True
    first_run: str = "skip"


XMPP = KindEntry(
    "xmpp",
    "everdeck_xmpp:Xmpp",
    XmppOptions,
    secrets=("PASSWORD",),
    needs=(("PASSWORD",),),
    text="an XMPP account",
)


class Xmpp(Kind[XmppOptions]):
    """One XMPP account."""

    def __init__(self, options: XmppOptions, context: Context) -> None:
        super().__init__(options, context)
        self.name = f"xmpp:{options.jid}"
        self._client: ClientXMPP | None = None
        self._arrived = asyncio.Event()

    async def close(self) -> None:
        """See :class:`Kind`."""
        if self._client is not None:
            await self._client.disconnect(wait=1)

    async def fetch(self, position: Position) -> Arrived:
        """What came after the last id; waits for a hint if there is nothing."""
        client = await self._connected()
        while True:
            self._arrived.clear()
            found = await self._after(client, position.cursor)
            if found is not None:
                return found
            await self._arrived.wait()

    async def send(self, outgoing: Outgoing) -> None:
        """Send it, and wait until the server has answered what came behind it."""
        client = await self._connected()
        message = client.make_message(mto=outgoing.to, mbody=outgoing.text, mtype="chat")
        message["id"] = outgoing.id
        message.send()
        await client.plugin["xep_0199"].send_ping(client.boundjid.domain, timeout=SECONDS)

    async def skip_history(self) -> str | None:
        """The newest id of the archive."""
        client = await self._connected()
        answer = await client.plugin["xep_0313"].retrieve(rsm={"before": True, "max": 1}, timeout=SECONDS)
        return answer["mam_fin"]["rsm"]["last"] or None

    async def _after(self, client: ClientXMPP, cursor: int | str | None) -> Arrived | None:
        rsm = {"max": PAGE} | ({"after": cursor} if cursor else {})
        answer = await client.plugin["xep_0313"].retrieve(rsm=rsm, timeout=SECONDS)
        messages = []
        for one in answer["mam"]["results"]:
            result = one["mam_result"]
            inner = result["forwarded"]["stanza"]
            sender = inner["from"].bare
            if inner["body"] and sender != client.boundjid.bare:
                messages.append(
                    Incoming(
                        id=result["id"],
                        channel="xmpp",
                        conversation=sender,
                        sender=sender,
                        text=inner["body"],
                        at=result["forwarded"]["delay"]["stamp"],
                        raw={"id": inner["id"]},
                    )
                )
        last = answer["mam_fin"]["rsm"]["last"]
        return Arrived(messages, last) if last and last != cursor else None

    async def _connected(self) -> ClientXMPP:
        if self._client is not None and self._client.is_connected():
            return self._client
        client = ClientXMPP(self.options.jid, self.context.needed_secret("PASSWORD"))
        for plugin in ("xep_0030", "xep_0059", "xep_0199", "xep_0297", "xep_0313"):
            client.register_plugin(plugin)
        ready = asyncio.get_running_loop().create_future()

        def settle(what: str | None) -> None:
            if not ready.done():
                ready.set_result(what)

        client.add_event_handler("session_start", lambda _: settle(None))
        client.add_event_handler("failed_all_auth", lambda _: settle("the server refuses the password"))
        client.add_event_handler("connection_failed", lambda why: settle(f"the server cannot be reached: {why}"))
        client.add_event_handler("message", lambda _: self._arrived.set())
        client.add_event_handler("disconnected", lambda _: self._arrived.set())
        if not self.options.tls:
            client.enable_starttls = client.enable_direct_tls = False
            client.enable_plaintext = True
            client.plugin["feature_mechanisms"].unencrypted_plain = True
        client.connect(self.options.host, self.options.port)
        async with asyncio.timeout(SECONDS):
            problem = await ready
        if problem is not None:
            await client.disconnect(wait=0)
            raise MessageError(problem)
        client.send_presence()
        self._client = client
        self.context.connected(account=self.options.jid)
        return client

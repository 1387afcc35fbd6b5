"""Access tokens for XOAUTH2: from a refresh token, or from a command that prints one.

A token is asked for anew when it is about to end and after every refused connection; it lives in memory only.
See developers.google.com/gmail/imap/xoauth2-protocol.
"""

import asyncio
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

import msgspec

from everdeck.errors import MessageError, SpecError

GOOGLE: Final = "https://oauth2.googleapis.com/token"
EARLY_SECONDS: Final = 120.0
COMMAND_LASTS_SECONDS: Final = 600.0
ASK_SECONDS: Final = 30.0


class TokenRefused(MessageError):
    """No access token could be had."""

    refused = True


class AccessToken:
    """The token of one account. ``secret`` is JSON with ``client_id``, ``client_secret``, ``refresh_token``."""

    def __init__(self, secret: str | None, command: Sequence[str] | None) -> None:
        self._grant: dict[str, str] = {}
        if secret is not None:
            try:
                self._grant = msgspec.json.decode(secret, type=dict[str, str])
            except msgspec.MsgspecError:
                raise SpecError(
                    "secrets.OAUTH", "<hidden>", "JSON with client_id, client_secret, refresh_token"
                ) from None
            if "refresh_token" not in self._grant:
                raise SpecError("secrets.OAUTH", sorted(self._grant), "JSON with a refresh_token")
        self._command = tuple(command or ())
        self._token = ""
        self._until = 0.0
        self._was_taken = False
        self._lock = threading.Lock()

    async def get(self) -> str:
        """A token that is still good."""
        if self._command and self._is_over():
            return await self._from_command()
        return await asyncio.to_thread(self.now)

    def now(self) -> str:
        """The same, from a thread."""
        with self._lock:
            if self._is_over() and self._grant:
                self._refresh()
            return self._token

    def taken(self) -> None:
        """A server has taken it."""
        self._was_taken = True

    def forget(self) -> bool:
        """It was refused: the next one is a new one. Was it taken before, so that a new one may be now?"""
        was_taken, self._was_taken = self._was_taken, False
        self._until = 0.0
        return was_taken

    def _is_over(self) -> bool:
        return monotonic() >= self._until

    def _refresh(self) -> None:
        uri = self._grant.get("token_uri", GOOGLE)
        given = {name: value for name, value in self._grant.items() if name != "token_uri"}
        body = urllib.parse.urlencode({**given, "grant_type": "refresh_token"}).encode()
        request = urllib.request.Request(uri, body, {"accept": "application/json"})  # noqa: S310 - the user's own URI
        try:
            with urllib.request.urlopen(request, timeout=ASK_SECONDS) as answer:  # noqa: S310 - as above
                told: dict[str, Any] = msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as err:
            said = err.read(500).decode("utf-8", "replace")
            raise TokenRefused(f"{uri} refuses the refresh token: {err.code} {said}") from None
        except (OSError, msgspec.DecodeError) as err:
            raise MessageError(f"{uri} cannot be asked for a token: {err}") from None
        self._token = str(told.get("access_token", ""))
        self._until = monotonic() + max(30.0, float(told.get("expires_in", 3600)) - EARLY_SECONDS)

    async def _from_command(self) -> str:
        process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
        token = printed.decode("utf-8", "replace").strip()
        if process.returncode != 0 or not token:
            raise TokenRefused(f"{self._command[0]} printed no token (code {process.returncode})")
        self._token, self._until = token, monotonic() + COMMAND_LASTS_SECONDS
        return token

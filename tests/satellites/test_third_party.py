"""A kind of another package, by its entry point, against a real server: Prosody and the example in ``examples/``."""

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from everdeck import Satellite, SpecError, WorkerSpec, satellites
from everdeck.testing.satellites import Victim, kill_trial
from support.repo_examples import ROOT
from support.sat_trial import patience, size, tell
from support.sat_xmpp import Prosody, needs_prosody

slixmpp = pytest.importorskip("slixmpp")
EXAMPLE = ROOT / "examples" / "satellite-xmpp"

pytestmark = [
    needs_prosody,
    patience(180),
    # The library's own timers outlive its client; they concern nobody.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example as an installed package: its module and its entry point."""
    shutil.copy(EXAMPLE / "everdeck_xmpp.py", tmp_path)
    about = tmp_path / "everdeck_xmpp-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: everdeck-xmpp\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[everdeck.satellites]\nxmpp = everdeck_xmpp:XMPP\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    satellites.kinds.cache_clear()
    yield tmp_path
    satellites.kinds.cache_clear()
    sys.modules.pop("everdeck_xmpp", None)


class People:
    """Alice and Carol, who write to Bob and read what he answers, in a thread of their own."""

    def __init__(self, server: Prosody, package: Path) -> None:
        self._server = server
        self._package = package
        self._got: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._clients: list[Any] = []

    def __enter__(self) -> Self:
        self._thread.start()
        for user in ("alice", "carol"):
            self._clients.append(self._call(self._connected(f"{user}@localhost")))
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            self._call(_gone(client))
        self._call(_settled())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def spec(self) -> WorkerSpec:
        """Bob's account."""
        return Satellite.of(
            "xmpp",
            {
                "jid": "bob@localhost",
                "host": "127.0.0.1",
                "port": self._server.port,
                "tls": False,
                "first_run": "take",
            },
            secrets={"PASSWORD": self._server.password},
            env={"PYTHONPATH": str(self._package)},
        )

    def deliver(self, text: str, conversation: int) -> None:
        """One of the two writes to Bob."""
        client = self._clients[conversation % 2]
        self._call(_said(client, text))

    def received(self) -> list[str]:
        """What Bob has answered."""
        return list(self._got)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _connected(self, jid: str) -> Any:
        client = slixmpp.ClientXMPP(jid, self._server.password)
        client.register_plugin("xep_0199")
        client.enable_starttls = client.enable_direct_tls = False
        client.enable_plaintext = True
        client.plugin["feature_mechanisms"].unencrypted_plain = True
        client.add_event_handler("message", lambda message: self._got.append(message["body"]))
        ready = client.wait_until("session_start", 30)
        client.connect("127.0.0.1", self._server.port)
        await ready
        client.send_presence()
        return client


async def _said(client: Any, text: str) -> None:
    client.send_message(mto="bob@localhost", mbody=text, mtype="chat")
    await client.plugin["xep_0199"].send_ping("localhost", timeout=30)


async def _settled() -> None:
    """Nothing of the library is left that would speak of the loop after its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0.1)


async def _gone(client: Any) -> None:
    await client.disconnect(wait=1)


def test_a_kind_of_another_package_is_known_by_its_entry_point(installed: Path) -> None:
    """Its options and secrets are checked as ours are."""
    assert "xmpp" in satellites.kinds()
    with pytest.raises(SpecError, match="PASSWORD"):
        Satellite.of("xmpp", {"jid": "bob@localhost"})
    with pytest.raises(SpecError, match="jid"):
        Satellite.of("xmpp", {}, secrets={"PASSWORD": "x"})


@pytest.mark.parametrize("who", ["satellite", "host", "owner"])
def test_the_kill_suite_holds_for_it(state: Path, installed: Path, who: Victim) -> None:
    """Two methods, and nothing is lost when anybody is killed."""
    messages, kills, deadline = size(30, 3)
    with Prosody() as server, People(server, installed) as people:
        trial = kill_trial(
            people, state, who=who, messages=messages, kills=kills, conversations=2, deadline_seconds=deadline
        )
    tell("xmpp", who, trial)

    assert trial.kills == kills
    assert trial.lost == []
    assert trial.disorder == []
    assert trial.duplicates <= trial.kills

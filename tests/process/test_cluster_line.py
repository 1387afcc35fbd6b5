"""What the deck of a cluster does when whom it asks says nothing."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from everdeck.cluster import api as api_module
from everdeck.cluster.api import Api
from everdeck.errors import ClientError


def test_a_pod_that_cannot_be_entered_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server has taken the call, and waits for a node that is cut off."""
    monkeypatch.setattr(api_module, "REQUEST_SECONDS", 0.5)
    kubeconfig = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster = {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        told = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "admin"}}],
        }
        kubeconfig.write_text(json.dumps(told))

        async def scenario() -> None:
            api = await Api("bots").connect()
            try:
                async with asyncio.timeout(30), api.command("alice-0", ["true"]):
                    raise AssertionError("nobody answered")
            finally:
                await api.close()

        with pytest.raises(ClientError, match="alice-0 cannot be entered"):
            asyncio.run(scenario())

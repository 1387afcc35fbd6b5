"""``everdeck --state kubernetes:NAMESPACE mcp``: an agent runs workers of a cluster."""

import asyncio
import os
import sys
from collections.abc import Awaitable
from typing import Any

import pytest

from support.waiting import eventually

mcp = pytest.importorskip("mcp")

PATIENCE_SECONDS = 600.0
ECHO = ["sh", "-c", "echo hello from a pod; exec sleep 1000"]


def test_an_agent_lists_starts_reads_and_stops(namespace: str) -> None:
    """The SDK's own client over standard input and output; the same answers as on one box."""
    words = ["-P", "-m", "everdeck.cli", "--state", f"kubernetes:{namespace}", "mcp"]
    words += ["--allow", "operate", "--commands", "sh -c *"]
    server = mcp.StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))

    async def says(asked: Awaitable[str]) -> bool:
        return "hello from a pod" in await asked

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), mcp.Client(server) as client:

            async def does(tool: str, **arguments: Any) -> str:
                answer = await client.call_tool(tool, arguments)
                text = "\n".join(part.text for part in answer.content)
                assert not answer.is_error, text
                return text

            assert "no workers" in await does("list_workers")
            assert "alice running" in await does("start_worker", name="alice", command=ECHO)
            assert "alice" in await does("list_workers")
            await eventually(lambda: says(does("worker_logs", name="alice")), "its log", PATIENCE_SECONDS)
            assert "runs: sh -c" in await does("inspect_worker", name="alice")
            assert "alice stopped" in await does("stop_worker", name="alice")

    asyncio.run(scenario())

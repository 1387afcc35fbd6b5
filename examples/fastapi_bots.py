"""One bot per user behind a small HTTP API; the bots survive every restart of it.

Run: ``uvicorn --app-dir examples fastapi_bots:app``, then ``curl -X POST http://127.0.0.1:8000/users/alice/bot``.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from everdeck import AsyncDeck, EverdeckError, UnknownWorker, WorkerStatus

BOT = [sys.executable, "-c", "import signal; signal.pause()"]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Own the deck for as long as the application serves."""
    async with AsyncDeck("bots-state") as app.state.deck:
        yield


app = FastAPI(lifespan=lifespan)


def shown(status: WorkerStatus) -> dict[str, object]:
    return {"user": status.name, "state": status.state, "pid": status.pid, "adopted": status.adopted}


@app.post("/users/{user}/bot")
async def start(user: str) -> dict[str, object]:
    try:
        return shown(await app.state.deck.start(user, BOT, env={"BOT_USER": user}))
    except EverdeckError as error:
        raise HTTPException(400, str(error)) from error


@app.delete("/users/{user}/bot")
async def stop(user: str) -> dict[str, object]:
    try:
        return shown(await app.state.deck.stop(user))
    except UnknownWorker as error:
        raise HTTPException(404, str(error)) from error


@app.get("/bots")
async def bots() -> list[dict[str, object]]:
    return [shown(status) for status in await app.state.deck.list()]

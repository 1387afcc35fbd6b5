"""Four web processes, one deck: whichever of them answers, it finds everybody's bot, and starts none twice.

Run: ``uvicorn --workers 4 --app-dir examples fastapi_four:app``, then open ``http://127.0.0.1:8000/docs``. One of the
four owns the deck and the others ask it. Kill -9 that one: another owns the deck in a moment, and no bot notices.
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from everdeck import AsyncDeck, EverdeckError, UnknownWorker, WorkerStatus

BOT = [sys.executable, "-c", "import signal; print('hello', flush=True); signal.pause()"]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Each of the four opens the same directory: the first owns it, the others join."""
    async with AsyncDeck("bots-state") as app.state.deck:
        yield


app = FastAPI(lifespan=lifespan)


def shown(status: WorkerStatus) -> dict[str, object]:
    return {"user": status.name, "state": status.state, "pid": status.pid, "answered_by": os.getpid()}


@app.put("/bots/{user}")
async def start(user: str) -> dict[str, object]:
    try:
        return shown(await app.state.deck.start(user, BOT))  # one that runs already is left alone
    except EverdeckError as error:
        raise HTTPException(400, str(error)) from error


@app.delete("/bots/{user}")
async def stop(user: str) -> dict[str, object]:
    try:
        return shown(await app.state.deck.stop(user))
    except UnknownWorker as error:
        raise HTTPException(404, str(error)) from error


@app.get("/bots")
async def bots() -> list[dict[str, object]]:
    return [shown(status) for status in await app.state.deck.list()]


@app.get("/events")
async def events(after: int = 0) -> StreamingResponse:
    """Everything that happened and happens, from any of the four: in order, each once."""

    async def lines() -> AsyncIterator[str]:
        async for event in app.state.deck.follow(after):
            yield f"id: {event.id}\ndata: {event.kind} {event.worker or ''}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")

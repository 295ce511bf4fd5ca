"""Serves the page of one run on 127.0.0.1, to whoever has the link, and changes nothing."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from squall.checks import require
from squall.live.feed import Feed, activity
from squall.record.rows import RecordError

HOST, PORT, PORTS = "127.0.0.1", 7780, 100  # where it is served, and how many ports are tried from there on
LOOK_EVERY_S = 0.5
SILENT_S = 15.0  # a word after so long: else nobody learns that a page was closed

STATIC = Path(__file__).with_name("static")
HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'",
    b"referrer-policy": b"no-referrer",  # the link has the token in it
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
}


def bound(port: int) -> socket.socket:
    """A socket that listens there, or on the next port that is free. Raises `ValueError` where there is none."""
    require("port", port, 0 <= port < 1 << 16, "from 0 to 65535")
    for number in range(port, min(port + PORTS, 1 << 16)):
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((HOST, number))
            made.listen()
            return made
        except OSError as error:
            made.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise ValueError(f"no port from {port} on is free on {HOST}: give another one with --port")


def link(listener: socket.socket, token: str) -> str:
    return f"http://{HOST}:{listener.getsockname()[1]}/{token}/"


def serve(run_dir: Path, listener: socket.socket, token: str) -> None:
    """Until the process is interrupted."""
    config = uvicorn.Config(
        application(run_dir, token), lifespan="off", timeout_graceful_shutdown=0, access_log=False,
        log_level="critical", log_config=None,  # else it closes all handlers of the process that are there
    )  # fmt: skip
    asyncio.run(_Server(config).serve([listener]))


class _Server(uvicorn.Server):
    """Signals are left to the command, which ends as every command does."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def new_token() -> str:
    return secrets.token_urlsafe(16)


def application(run_dir: Path, token: str) -> Starlette:
    """All that is served lies below the token."""
    record = run_dir / "run.sqlite"

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "page.html")

    async def news(request: Request) -> Response:
        return StreamingResponse(_news(record, run_dir.resolve().name), media_type="text/event-stream")

    async def whole(request: Request) -> Response:
        try:
            return Response(await run_in_threadpool(activity, record), media_type="application/json")
        except RecordError:  # there is none yet, or it is locked: the page asks again
            return Response(status_code=503)

    routes = [
        Route("/", page),
        Route("/news", news),
        Route("/activity", whole),
        Mount("/", StaticFiles(directory=STATIC)),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=[Mount("/{token}", routes=routes)], middleware=[hosts, Middleware(_Guarded, token=token)])


async def _news(record: Path, name: str) -> AsyncIterator[str]:
    """What the page is told: first all that it can show, then what is new."""
    while not record.exists():  # the run has not begun
        yield ": not yet\n\n"
        await asyncio.sleep(LOOK_EVERY_S)
    silent_s = 0.0
    with suppress(RecordError), closing(Feed(record, name)) as feed:  # then the page asks again
        told: bytes | None = await run_in_threadpool(feed.begin)
        while True:
            silent_s = 0.0 if told else silent_s + LOOK_EVERY_S
            if told:
                yield f"data: {told.decode()}\n\n"
            elif silent_s >= SILENT_S:
                silent_s = 0.0
                yield ": nothing new\n\n"
            await asyncio.sleep(LOOK_EVERY_S)
            told = await run_in_threadpool(feed.more)


class _Guarded:
    """Lets in who has the token, and says to browsers that nothing from elsewhere belongs to the page."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS.items()]
            await send(message)

        given = scope["path"].removeprefix("/").partition("/")[0]
        # In constant time: others on this machine may ask as often as they like.
        app = self._app if secrets.compare_digest(given.encode(), self._token) else Response(status_code=404)
        await app(scope, receive, guarded)

"""The whole HTTP application: API, streams, metrics, page, and the guard in front of them.

It is one Litestar application over the values of :mod:`everdeck.model`; the OpenAPI document at ``/openapi.json`` is
made from the same types that are sent.
"""

from collections.abc import Iterable
from typing import Any, Final

from litestar import Litestar, Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin

from everdeck import __version__
from everdeck.server import accesslog, entrance, problems
from everdeck.server.api import HANDLERS
from everdeck.server.auth import Guard
from everdeck.server.services import Services
from everdeck.server.serving import AsgiApp

MOST_BODY_BYTES: Final = 4_000_000
_SCHEMA_FOLDER: Final = "/api/v1/schema"


def create_app(services: Services, hosts: Iterable[str] = (), public_url: str | None = None) -> AsgiApp:
    """The application of one daemon, guarded."""
    app: Any = create_litestar(services)  # Litestar types its scopes more narrowly than ASGI itself
    guard = Guard(app, services.door, frozenset(hosts), public_url)
    return accesslog.logged(_headed(guard, public_url))


def create_litestar(services: Services | None) -> Litestar:
    """The application without its guard; without services it can only describe itself."""
    app = _MsgspecOnly(
        route_handlers=[*HANDLERS, *entrance.HANDLERS, _openapi, *_page_routes()],
        openapi_config=OpenAPIConfig(
            title="Everdeck",
            version=__version__,
            description="One deck of workers: list, start, stop, watch. Errors are RFC 9457 problem documents. "
            "A request that acts may carry an Idempotency-Key: sent again with it, it is answered and not repeated.",
            path=_SCHEMA_FOLDER,
            render_plugins=[JsonRenderPlugin()],
            components=Components(
                security_schemes={"token": SecurityScheme(type="http", scheme="bearer", description="STATE/token")}
            ),
            security=[{"token": []}],
            use_handler_docstrings=True,
        ),
        exception_handlers={Exception: problems.answer},
        request_max_body_size=MOST_BODY_BYTES,
        logging_config=None,
    )
    app.state.services = services
    return app


class _MsgspecOnly(Litestar):
    """Litestar without its plugins for pydantic and attrs.

    It loads both whenever they are installed (aiogram brings pydantic), which costs 8 MB in a daemon that speaks
    msgspec only. There is no public switch in 2.x; when one comes, this class may go.
    """

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


@get("/openapi.json", include_in_schema=False)
async def _openapi(request: Request[Any, Any, Any]) -> Response[dict[str, Any]]:
    return Response(request.app.openapi_schema.to_schema(), media_type="application/json")


def _page_routes() -> list[HTTPRouteHandler]:
    from everdeck.server.dashboard import create_dashboard_routes  # noqa: PLC0415 - the page's own dependencies load last

    return create_dashboard_routes()


def _headed(app: AsgiApp, public_url: str | None) -> AsgiApp:
    """The same application with the headers that every answer needs, unless the page has set its own.

    Strict-Transport-Security only for a public https address: it holds for every port of a host (RFC 6797, section
    8.3), and said for localhost it would lock people out of everything else they run there.
    """
    ours: tuple[tuple[bytes, bytes], ...] = (
        (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
        (b"cross-origin-resource-policy", b"same-origin"),
    )
    if public_url is not None and public_url.startswith("https://"):
        ours += ((b"strict-transport-security", b"max-age=31536000"),)

    async def headed(scope: Any, receive: Any, send: Any) -> None:
        async def send_headed(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {key.lower() for key, _ in message.get("headers", ())}
                added = [(key, value) for key, value in ours if key not in present]
                if b"cache-control" not in present:
                    added.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await app(scope, receive, send_headed)

    return headed

"""The page: an HTML shell, its ES modules and its style sheets, served as they lie in this folder.

Owns the routes ``/`` and ``/static/…`` and the security headers on them. Promises:

- nothing here holds data of a deck, so both need no login: the page asks the API, and shows its login form when the
  API says 401; ``/login#token=…`` is the same page, which takes the token from its address;
- nothing is built: a file that is changed is served changed. The address of every file carries a digest of all of
  them, so a browser keeps what it has for as long as it is true, and an upgraded daemon never meets old modules;
- the browser loads nothing from another host and runs no inline script or style: the Content-Security-Policy forbids
  both, and Trusted Types forbid making markup out of text.
"""

import hashlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Final

from litestar import Request, Response, get
from litestar.datastructures import State as AppState
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.status_codes import HTTP_304_NOT_MODIFIED

from everdeck import __version__

_HERE: Final = Path(__file__).resolve().parent
_STATIC: Final = _HERE / "static"

_RULES: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "manifest-src 'self'",
    "form-action 'self'",
    "base-uri 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
CONTENT_SECURITY_POLICY: Final = "; ".join(_RULES)

_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    # Nobody outside needs to know which worker somebody looked at.
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}


def create_dashboard_routes() -> list[HTTPRouteHandler]:
    """The route handlers of the page, to be mounted beside the API's."""
    if find_spec("jinja2") is None:  # it is loaded with the first page; that it is missing is told before
        raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
    return [_page, _static_file]


@get(["/", "/login"], include_in_schema=False, sync_to_thread=False)
def _page(request: Request[object, object, AppState]) -> Response[bytes]:
    body = _shell(_digest()).encode()
    etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**_HEADERS, "etag": etag, "cache-control": "no-cache"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(b"", status_code=HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(body, media_type=_MEDIA_TYPES[".html"], headers=headers)


@get("/static/{digest:str}/{path:path}", include_in_schema=False, sync_to_thread=False)
def _static_file(digest: str, path: PurePosixPath) -> Response[bytes]:  # noqa: ARG001 - the digest only names the address
    file = (_STATIC / str(path).lstrip("/")).resolve()
    # Resolved before it is compared, so that neither ".." nor a link leads out of the folder.
    if not file.is_relative_to(_STATIC) or file.suffix not in _MEDIA_TYPES or not file.is_file():
        raise NotFoundException(detail=f"no file {str(path)!r} belongs to the page")
    headers = {**_HEADERS, "cache-control": "public, max-age=31536000, immutable"}
    return Response(file.read_bytes(), media_type=_MEDIA_TYPES[file.suffix], headers=headers)


def _digest() -> str:
    """Changes whenever a file of the page does."""
    seen = hashlib.blake2b(__version__.encode(), digest_size=8)
    for file in sorted((*_STATIC.rglob("*"), *_HERE.glob("templates/*"))):
        if file.is_file():
            facts = file.stat()
            seen.update(f"{file.name}:{facts.st_size}:{facts.st_mtime_ns};".encode())
    return seen.hexdigest()


@lru_cache(maxsize=2)
def _shell(digest: str) -> str:
    """The HTML with every style sheet and module named, so that adding a widget is adding its two files."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - 3 MB that only a page needs

    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined, auto_reload=False
    )
    return environment.get_template("index.html").render(
        version=__version__,
        root=f"static/{digest}",
        # Theme first, then vendors, then one sheet per widget and view: later ones may refine earlier ones.
        styles=[_path(file) for folder in ("theme", "vendor", "widgets", "views") for file in _files(folder, "*.css")],
        modules=[_path(file) for folder in ("core", "widgets", "views") for file in _files(folder, "*.js")],
    )


def _files(folder: str, pattern: str) -> list[Path]:
    return sorted((_STATIC / folder).glob(pattern))


def _path(file: Path) -> str:
    return file.relative_to(_STATIC).as_posix()

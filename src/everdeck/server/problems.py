"""What a caller of the API is told when something cannot be done: RFC 9457 ``application/problem+json``.

One table says which error of the tree is which status. The ``type`` is stable and made from the error's name
(``urn:everdeck:unknown-worker``); ``field``, ``fields`` and ``suggestions`` are there when the error knows them.
``fault`` is the error by its class with all its fields, from which :mod:`everdeck.remote` raises it again.
Nothing of a request's body is repeated except the refused field, so that no secret comes back in an error.
"""

import logging
import re
from http import HTTPStatus
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from everdeck import errors
from everdeck.faults import Fault, fault_of

MEDIA_TYPE: Final = "application/problem+json"
_log: Final = logging.getLogger("everdeck.server")

_STATUS: Final[tuple[tuple[type[errors.EverdeckError], HTTPStatus], ...]] = (
    (errors.SpecError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.SpecChanged, HTTPStatus.CONFLICT),
    (errors.UnknownWorker, HTTPStatus.NOT_FOUND),
    (errors.WorkerFailed, HTTPStatus.CONFLICT),
    (errors.StopFailed, HTTPStatus.CONFLICT),
    (errors.Unsupported, HTTPStatus.NOT_IMPLEMENTED),
    (errors.MessageError, HTTPStatus.CONFLICT),
    (errors.RecordBroken, HTTPStatus.CONFLICT),
    (errors.LockConflict, HTTPStatus.CONFLICT),
    (errors.PortUnavailable, HTTPStatus.CONFLICT),
    (errors.SpawnFailed, HTTPStatus.UNPROCESSABLE_ENTITY),
    (errors.ProcessGone, HTTPStatus.CONFLICT),
    (errors.NotPermitted, HTTPStatus.FORBIDDEN),
    (errors.AccessDenied, HTTPStatus.FORBIDDEN),
    (errors.ResourceExhausted, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.KernelError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.DeckError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.RegistryError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.FeedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (errors.ClientError, HTTPStatus.SERVICE_UNAVAILABLE),  # this daemon is a member, and the owner did not answer it
)


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something was not done."""

    type: str
    title: str
    status: int
    detail: str = ""
    field: str | None = None
    fields: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    fault: Fault | None = None


def problem_of(error: Exception) -> Problem:
    """The problem document of an error."""
    error = _refused_value(error) or error
    if _is_unreadable_body(error):
        status = HTTPStatus.BAD_REQUEST
        why = "nested too deeply" if isinstance(error, RecursionError) else "not UTF-8 text"
        return Problem("about:blank", status.phrase, status, f"the body cannot be read: {why}")
    if isinstance(error, errors.EverdeckError):
        status = status_of(type(error))
        field = error.field if isinstance(error, errors.SpecError) else None
        if isinstance(error, errors.SpawnFailed):
            field = "command"
        return Problem(
            type=f"urn:everdeck:{_dashed(type(error).__name__)}",
            title=status.phrase,
            status=status,
            detail=_readable(str(error)),
            field=None if field is None else _readable(field),
            fields=tuple(getattr(error, "fields", ())),
            suggestions=tuple(getattr(error, "suggestions", ())),
            fault=fault_of(error),
        )
    if isinstance(error, ExceptionGroup):
        each = [problem_of(one) for one in error.exceptions if isinstance(one, Exception)]
        status = HTTPStatus(max(told.status for told in each))
        return Problem("urn:everdeck:several", status.phrase, status, _readable(error.message), fault=fault_of(error))
    if isinstance(error, HTTPException):
        status = HTTPStatus(error.status_code)
        return Problem(
            type="about:blank", title=status.phrase, status=status, detail=_http_detail(error), field=_http_field(error)
        )
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return Problem("about:blank", status.phrase, status, "an unexpected error; the daemon's log has the details")


def status_of(kind: type[errors.EverdeckError]) -> HTTPStatus:
    """The status that an error of the tree is answered with."""
    return next((status for known, status in _STATUS if issubclass(kind, known)), HTTPStatus.INTERNAL_SERVER_ERROR)


def problem(status: HTTPStatus, detail: str, kind: str = "about:blank") -> Problem:
    """A problem that is no error of the tree."""
    return Problem(kind, status.phrase, status, detail)


def answer(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """Litestar's exception handler for everything."""
    told = problem_of(error)
    if told.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, errors.EverdeckError | HTTPException):
        _log.error("%s %s: %s", request.method, request.url.path, type(error).__name__, exc_info=error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return Response(told, status_code=told.status, media_type=MEDIA_TYPE, headers=headers)


def _is_unreadable_body(error: BaseException) -> bool:
    """A body that the decoder gave up on. Anywhere else the same errors are faults of ours."""
    frame = error.__traceback__ if isinstance(error, RecursionError | UnicodeDecodeError) else None
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.endswith("litestar/serialization/msgspec_hooks.py"):
            return True
        frame = frame.tb_next
    return False


def _refused_value(error: Exception) -> errors.SpecError | None:
    """The refusal of a value inside a body, which reaches us wrapped by msgspec and by Litestar."""
    inner: BaseException | None = error if isinstance(error, ValidationException) else None
    while inner is not None and not isinstance(inner, errors.SpecError):
        inner = inner.__cause__ or inner.__context__
    return inner


def _http_detail(error: HTTPException) -> str:
    said = _readable(error.detail)
    # "Validation failed for GET /path?query" repeats what was sent; the list behind it says what was wrong.
    if isinstance(error, ValidationException) and isinstance(error.extra, list):
        said = "; ".join(_readable(f"{entry.get('key', '')}: {entry.get('message', '')}") for entry in error.extra)
    return said


def _http_field(error: HTTPException) -> str | None:
    if isinstance(error, ValidationException) and isinstance(error.extra, list) and error.extra:
        key = error.extra[0].get("key")
        return _readable(str(key)) if key else None
    return None


def _dashed(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def _readable(text: str) -> str:
    """The text as UTF-8 can carry it: a lone surrogate in a request must not break the answer about it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

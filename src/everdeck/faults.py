"""An error on its way from the owner to a caller: it arrives as the class it was raised as, with the same fields.

A :class:`Fault` is what every wire carries, frames and HTTP alike. The fields are the attributes that the error's
constructor sets, so an error that gets one more needs no word here. An error that is not of our tree is a bug of the
owner's: its text stays in the owner's log, and the caller gets :class:`everdeck.errors.OwnerRefused`.
"""

from functools import cache
from typing import Any, Final, get_origin, get_type_hints

import msgspec

from everdeck import errors
from everdeck.errors import EverdeckError, OwnerRefused

GROUP: Final = "ExceptionGroup"
# MessagePack has no wider whole numbers; SpecError may carry any that somebody typed.
_WIDEST: Final = 63


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error by its class's name, what it says, its fields, and the errors inside it if it is a group."""

    error: str
    message: str
    fields: dict[str, Any] = {}
    inside: "list[Fault]" = []


def fault_of(error: BaseException) -> Fault:
    """The error as it can travel."""
    if isinstance(error, ExceptionGroup):
        return Fault(GROUP, readable(error.message), inside=[fault_of(one) for one in error.exceptions])
    if not isinstance(error, EverdeckError):
        return Fault(OwnerRefused.__name__, "an unexpected error; the owner's log has the details")
    known = _known(type(error))
    message = readable(str(error))  # first: a field may be worked out only for it
    fields = {name: _plain(value) for name, value in vars(error).items() if not name.startswith("_")}
    return Fault(known.__name__, message, fields)


def error_of(fault: Fault) -> Exception:
    """The error as it was raised; a class that only a newer Everdeck has arrives as :class:`OwnerRefused`."""
    if fault.error == GROUP:
        return ExceptionGroup(fault.message, [error_of(one) for one in fault.inside])
    kind = classes().get(fault.error, OwnerRefused)
    # Not through the constructor, which would make the message a second time, from fields that have travelled.
    error = kind.__new__(kind, fault.message)
    error.args = (fault.message,)
    tuples = _tuples(kind.__name__)
    for name, value in fault.fields.items():
        setattr(error, name, tuple(value) if name in tuples and isinstance(value, list) else value)
    return error


@cache
def classes() -> dict[str, type[EverdeckError]]:
    """Every error of the tree by its name."""
    return {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, EverdeckError)
    }


def readable(text: str) -> str:
    """The text as UTF-8 can carry it: a lone surrogate in a request must not break the answer about it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _known(kind: type[EverdeckError]) -> type[EverdeckError]:
    """The nearest class of the tree: a caller elsewhere knows no others."""
    return next(one for one in kind.__mro__ if classes().get(one.__name__) is one)


@cache
def _tuples(name: str) -> frozenset[str]:
    """The fields of this class that are tuples, which come as lists."""
    made = vars(classes()[name]).get("__init__")
    return frozenset(key for key, hint in get_type_hints(made).items() if get_origin(hint) is tuple) if made else _NONE


_NONE: Final[frozenset[str]] = frozenset()


def _plain(value: object) -> Any:
    match value:
        case int() if value.bit_length() > _WIDEST:
            return repr(value)
        case None | bool() | int() | float():
            return value
        case str():
            return readable(value)
        case list() | tuple():
            return [_plain(one) for one in value]
        case dict():
            return {readable(str(key)): _plain(one) for key, one in value.items()}
        case _:
            return readable(repr(value))

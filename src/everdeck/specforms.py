"""The other forms of a spec, each made from the fields of :class:`everdeck.model.WorkerSpec`.

A spec is written in everdeck.toml, sent to the API, shown by it and typed on a command line. None of these lists its
fields: a field is declared in ``WorkerSpec`` with its type, its default and its description, and is then everywhere.
"""

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from everdeck.errors import SpecError
from everdeck.model import WorkerSpec

_NONE: Final = type(None)


def optional_fields(*, parts: bool = False, **instead: Any) -> list[tuple[str, Any, Any]]:
    """Every field of a spec as something that may be left out, for :func:`msgspec.defstruct`.

    ``instead`` gives another type, with a description, to a field that is written differently there, such as secrets
    that are named by file. With ``parts`` the fields inside ``restart``, ``stop`` … may be left out too, so that they
    can be laid over those of a template.
    """
    hints = get_type_hints(WorkerSpec, include_extras=True) | instead
    return [(name, _or_unset(hints[name], parts=parts), UNSET) for name in WorkerSpec.__struct_fields__]


def paths() -> dict[str, Any]:
    """Every value that a spec holds, by its dotted path (``restart.max_crashes``), with its type."""
    return dict(_paths(WorkerSpec, ""))


def with_path(fields: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at its path into the fields of a spec; refuses a path that there is not."""
    if path not in paths() and path.partition(".")[0] not in {"env", "labels"}:
        raise SpecError(path, value, f"one of {', '.join(paths())}")
    *outer, last = path.split(".", 1) if path.partition(".")[0] in {"env", "labels"} else path.split(".")
    for key in outer:
        fields = fields.setdefault(key, {})
    fields[last] = value


def view_fields(**instead: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every field of a spec as it is shown; ``instead`` replaces a field by others: ``env={"env_keys": list[str]}``."""
    hints = get_type_hints(WorkerSpec, include_extras=True)
    shown: list[tuple[str, Any]] = []
    for name in WorkerSpec.__struct_fields__:
        shown += instead[name].items() if name in instead else [(name, hints[name])]
    return shown


def _or_unset(hint: Any, *, parts: bool) -> Any:
    """``Annotated[X | None, meta]`` as ``Annotated[X, meta] | UnsetType``: what is left out is not said, never None."""
    bare, *meta = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kinds = [_part_of(kind) if parts and _is_struct(kind) else kind for kind in _members(bare) if kind is not _NONE]
    said: Any = Union[tuple(kinds)]  # noqa: UP007 - made of what is only known here
    return Union[Annotated[said, *meta] if meta else said, UnsetType]  # noqa: UP007 - as above


@cache
def _part_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    hints = get_type_hints(kind, include_extras=True)
    fields = [(name, Union[hints[name], UnsetType], UNSET) for name in kind.__struct_fields__]  # noqa: UP007 - as above
    doc = {"__doc__": f"{kind.__doc__} What is left out is as the template says, or as usual."}
    return msgspec.defstruct(f"{kind.__name__}Part", fields, namespace=doc, frozen=True, forbid_unknown_fields=True)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _paths(kind: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(kind).items():
        inner = next((one for one in _members(hint) if _is_struct(one)), None)
        if inner is None:
            yield f"{prefix}{name}", hint
        else:
            yield from _paths(inner, f"{prefix}{name}.")

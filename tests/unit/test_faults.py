"""An error that travels arrives as it was raised."""

import inspect

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everdeck import errors
from everdeck.errors import EverdeckError, OwnerRefused, SpecError, UnknownWorker
from everdeck.faults import Fault, classes, error_of, fault_of

SAMPLES = {"str": "text \ud800", "int": 7, "object": ["x", 1], "tuple[str, ...]": ("a", "b"), "tuple[int, ...]": (1,)}


def made(kind: type[EverdeckError]) -> EverdeckError:
    """One error of this class, each argument with a value of its type."""
    if not inspect.isfunction(kind.__init__):
        return kind("what happened")
    asked = inspect.signature(kind.__init__).parameters
    return kind(
        **{
            name: SAMPLES[inspect.formatannotation(one.annotation).split(" | ")[0]]
            for name, one in asked.items()
            if name != "self"
        }
    )


def travelled(error: BaseException) -> Exception:
    """The error after a way through JSON and through MessagePack."""
    fault = msgspec.json.decode(msgspec.json.encode(fault_of(error)), type=Fault)
    return error_of(msgspec.msgpack.decode(msgspec.msgpack.encode(fault), type=Fault))


@pytest.mark.parametrize("name", sorted(classes()))
def test_every_error_arrives_as_its_class_with_its_fields_and_words(name: str) -> None:
    """Of the whole tree, without a list of it; a lone surrogate is the one thing that cannot travel as it is."""
    error = made(classes()[name])

    arrived = travelled(error)

    assert type(arrived) is type(error)
    assert str(arrived) == str(error).encode("utf-8", "backslashreplace").decode()
    there, here = vars(arrived), vars(error)
    assert {key: type(value) for key, value in there.items()} == {key: type(value) for key, value in here.items()}
    assert there.get("suggestions") == here.get("suggestions")


@pytest.mark.parametrize("name", sorted(classes()))
def test_every_argument_of_an_error_is_an_attribute(name: str) -> None:
    """What a constructor was told can be read again: otherwise it would be lost on the way."""
    kind = classes()[name]
    if inspect.isfunction(kind.__init__):
        told = set(inspect.signature(kind.__init__).parameters) - {"self"}
        assert told <= vars(made(kind)).keys()


def test_a_group_arrives_with_each_of_its_errors() -> None:
    """As start_many raises it."""
    group = ExceptionGroup("2 of 3 were not started", [UnknownWorker("bob"), SpecError("cwd", 7, "a text")])

    arrived = travelled(group)

    assert isinstance(arrived, ExceptionGroup)
    assert [type(one) for one in arrived.exceptions] == [UnknownWorker, SpecError]
    assert arrived.message == "2 of 3 were not started"


def test_what_is_not_of_the_tree_keeps_its_words_at_home() -> None:
    """A bug of the owner's may have anything in its text."""
    arrived = travelled(RuntimeError("the token is 123:abc"))

    assert type(arrived) is OwnerRefused
    assert "123:abc" not in str(arrived)


def test_a_class_from_the_future_arrives_as_a_refusal() -> None:
    """And a class of somebody's own as the nearest one of the tree."""

    class Mine(UnknownWorker):
        """Nobody else knows it."""

    assert type(error_of(Fault("BrandNew", "no", {"why": "later"}))) is OwnerRefused
    assert type(travelled(Mine("alice"))) is UnknownWorker


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.binary(), st.lists))
def test_any_value_that_was_refused_can_be_told(value: object) -> None:
    """``given`` is whatever somebody handed in."""
    arrived = travelled(SpecError("field", value, "something else"))

    assert isinstance(arrived, errors.SpecError)
    assert arrived.field == "field"

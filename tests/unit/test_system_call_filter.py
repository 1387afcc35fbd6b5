"""The filter of system calls of a strict sandbox, carried out step by step as the kernel does it."""

import errno
import os
import struct
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from everdeck.kernel import sandbox

ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBERS = 470
"""As many as Linux 6.18 has."""


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each processor that there is a filter for, whichever this one is."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=request.param))
    sandbox.system_call_filter.cache_clear()
    yield request.param
    sandbox.system_call_filter.cache_clear()


def carried_out(number: int, machine: str, *arguments: int, arch: int | None = None) -> tuple[int, int]:
    """What the filter answers to a call, and after how many steps."""
    steps = list(struct.iter_unpack("=HBBI", sandbox.system_call_filter(unix_sockets=False)))
    own = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number, own if arch is None else arch, 0, *padded)
    at = taken = accumulator = 0
    while True:
        code, yes, no, value = steps[at]
        at, taken = at + 1, taken + 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, value)[0]
            case 0x54:
                accumulator &= value
            case 0x15:
                at += yes if accumulator == value else no
            case 0x35:
                at += yes if accumulator >= value else no
            case 0x45:
                at += yes if accumulator & value else no
            case 0x06:
                return value, taken
            case _:
                raise AssertionError(code)


def test_what_is_listed_is_refused_and_everything_else_allowed(machine: str) -> None:
    """Without arguments that matter, each number is told from its neighbours."""
    which = ["x86_64", "aarch64"].index(machine)
    refused = {numbers[which] for numbers in sandbox._REFUSED.values()}
    # setpriority and ioprio_set of nobody in particular are the caller's own; a socket of no family is refused.
    socket_call, clone3 = sandbox._SOCKET[which], 435
    for number in range(NUMBERS + 200):
        expected = REFUSE | errno.EPERM if number in refused else ALLOW
        expected = REFUSE | errno.EAFNOSUPPORT if number == socket_call else expected
        expected = REFUSE | errno.ENOSYS if number == clone3 else expected
        assert carried_out(number, machine)[0] == expected, number


def test_arguments_decide_where_they_matter(machine: str) -> None:
    """Flags, requests, modes and families are looked at; the same call without them passes."""
    which = ["x86_64", "aarch64"].index(machine)
    no = REFUSE | errno.EPERM
    for calls, at, bad in (
        ((sandbox._CLONE,), 0, 0x10000000),  # CLONE_NEWUSER
        ((sandbox._SENDTO, sandbox._SENDMMSG), 3, 0x20000000),  # MSG_FASTOPEN
        ((sandbox._SENDMSG,), 2, 0x20000000),
        ((sandbox._IOCTL,), 1, 0x5412),  # TIOCSTI
        *(((numbers,), at, 0o4755) for numbers, at in sandbox._MODES if numbers[which] is not None),
    ):
        for numbers in calls:
            number = numbers[which]
            assert number is not None
            assert carried_out(number, machine, *[0] * at, bad)[0] == no
            assert carried_out(number, machine, *[0] * at, 1)[0] == ALLOW
    for numbers in sandbox._SCHEDULE:
        assert carried_out(numbers[which], machine, 4711)[0] == REFUSE  # a yes without an effect
    assert carried_out(sandbox._PRLIMIT[which], machine, 4711, 7, 1 << 40)[0] == no
    assert carried_out(sandbox._PRLIMIT[which], machine, 4711, 7, 0)[0] == ALLOW
    stream, datagram = 1, 2
    assert carried_out(sandbox._SOCKET[which], machine, 2, stream | 0o2000000, 6)[0] == ALLOW
    assert carried_out(sandbox._SOCKET[which], machine, 2, stream, 262)[0] == REFUSE | errno.EPROTONOSUPPORT  # MPTCP
    assert carried_out(sandbox._SOCKET[which], machine, 1, datagram)[0] == ALLOW
    assert carried_out(sandbox._SOCKET[which], machine, 1, stream)[0] == REFUSE | errno.EACCES


def test_calls_of_another_processor_are_not_there(machine: str) -> None:
    """Their numbers mean something else, so none of them may be compared with ours."""
    assert carried_out(0, machine, arch=0x40000003)[0] == REFUSE | errno.ENOSYS
    if machine == "x86_64":
        for number in (0x40000000, 0x40000000 + 520, 0xFFFFFFFF):
            assert carried_out(number, machine)[0] == REFUSE | errno.ENOSYS


def test_a_number_is_decided_within_few_steps(machine: str) -> None:
    """The kernel tries every number at every start, so a filter that asks one after another is paid 470 times."""
    taken = [carried_out(number, machine)[1] for number in range(NUMBERS)]
    assert sum(taken) / len(taken) < 11
    assert max(taken) < 20

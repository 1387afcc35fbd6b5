r"""Make what a worker printed safe to look at.

A log holds whatever a process wrote: binary data, half of a UTF-8 sequence, escape sequences that move the cursor,
rename the window or answer as if the reader had typed. Shown as it is, it acts on the reader's terminal. So colours
are kept when asked for, other terminal sequences are taken out, and every remaining control
character is written as an escape such as ``\x07``. Of a line that writes over itself (``\r``) the last state is shown.
Characters that reorder the text around them count as control characters, because they make a line read differently
from what it says.

See ECMA-48 for the sequences, Unicode TR 9 for the bidirectional controls.
"""

import re
from typing import Final

_COLOUR: Final = r"\x1b\[[0-9;:]*m"
_SEQUENCE: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erase
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC: titles, links, clipboard
    r"|\x1b[ -/]*[0-Z\\^-~]"  # two-character sequences; not '[', ']', 'P': those are unfinished ones of above
)
_ONLY_COLOUR: Final = re.compile(_COLOUR)
_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)
_RESET: Final = "\x1b[0m"


def shown(line: bytes, *, colour: bool = False) -> str:
    """``line`` as text that only prints: no control characters except tab, and colours only if asked for."""
    # A progress bar writes over itself: its last state is what a terminal would show in the end.
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "backslashreplace")
    if _UNSAFE.search(text) is None:
        return text
    if not colour:
        return _UNSAFE.sub(_escaped, _SEQUENCE.sub("", text))
    text = _SEQUENCE.sub(_colour_or_nothing, text)
    pieces = re.split(f"({_COLOUR})", text)
    pieces[::2] = [_UNSAFE.sub(_escaped, piece) for piece in pieces[::2]]
    # A colour the worker left on must not run into the next line, which may be another worker's.
    return "".join(pieces) + (_RESET if len(pieces) > 1 else "")


def _colour_or_nothing(match: re.Match[str]) -> str:
    return match[0] if _ONLY_COLOUR.fullmatch(match[0]) else ""


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")

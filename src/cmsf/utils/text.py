"""Text from files and names, fit to be shown: nothing in it steers a terminal, turns words round or is endless."""

from __future__ import annotations

from unicodedata import category

MAX_LINE = 300
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Control characters, invisible marks (those that turn the direction of text among them), halves of letters, and ends
of lines."""
_JOINERS = "\u200c\u200d"  # which Persian, the scripts of India and emoji are written with


def escape_unprintable(text: str) -> str:
    """The same text, with an escape such as \\x1b in the place of what would not be seen; backslashes are left."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(letter) if _steers(letter) else letter for letter in text)


def is_encodable(text: str) -> bool:
    """Whether it can be written to a file at all: half a letter cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str, longest: int = MAX_LINE) -> str:
    """A long text without its middle: what is the matter comes first, and what to do about it last."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 3]} … {text[-end:]}"


def one_line(text: object, longest: int = MAX_LINE) -> str:
    """Any message in a line of a bearable length."""
    words = shorten(str(text), 4 * longest)  # of a text without end, no more than this is gone through
    return shorten(escape_unprintable(" ".join(words.splitlines())), longest)


def first_line(error: BaseException, longest: int = 160) -> str:
    """Returns the first line of an exception's message, or its type's name where it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shorten(escape_unprintable(lines[0][: 4 * longest]), longest)


def format_bytes(size: int) -> str:
    """Formats a size as 999 B or 1.2 GB."""
    amount, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def format_duration(seconds: float) -> str:
    """Formats seconds as 0:07 or 26:03:07."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def short_repr(value: object, longest: int = 80) -> str:
    """A value out of a file, for a message; one of which nobody knows how long it is when it is written out."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | set | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return shorten(str(value)[: 4 * longest], longest)


def _steers(letter: str) -> bool:
    return category(letter) in _STEERING and letter not in _JOINERS


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()

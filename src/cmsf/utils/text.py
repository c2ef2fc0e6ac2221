"""Text from files and names, made safe to print: no control characters, no change of direction, no endless lines."""

from __future__ import annotations

from unicodedata import category

MAX_LINE = 300
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control, format (such as a change of direction), surrogate, line and paragraph separators."""
_JOINERS = "\u200c\u200d"  # used in Persian, Indic scripts and emoji


def escape_unprintable(text: str) -> str:
    """Replaces control and invisible characters by escapes such as \\x1b; backslashes are left."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode() if category(letter) in _ESCAPED and letter not in _JOINERS else letter
        for letter in text
    )


def is_encodable(text: str) -> bool:
    """Returns whether a text can be written as UTF-8; one with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str, longest: int = MAX_LINE) -> str:
    """Cuts the middle out of a long text: a message begins with the problem and ends with the remedy."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 3]} … {text[-end:]}"


def one_line(text: object, longest: int = MAX_LINE) -> str:
    """Returns a message as one printable line of at most `longest` characters."""
    words = shorten(str(text), 4 * longest)  # bounds the work on a huge text
    return shorten(escape_unprintable(" ".join(words.splitlines())), longest)


def first_line(error: BaseException, longest: int = 160) -> str:
    """Returns the first line of an exception's message, or its type's name where it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shorten(escape_unprintable(lines[0][: 4 * longest]), longest)


def error_message(error: BaseException, longest: int = 160) -> str:
    """Returns the whole message of an exception in one line, or its type's name where it has none."""
    return one_line(" ".join(str(error).split()) or type(error).__name__, longest)


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


def format_time_left(seconds: float) -> str:
    """Formats seconds to go as 40 s left, 12 min left or 2 h 5 min left."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s left"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min left" if hours else f"{minutes} min left"


def short_repr(value: object, longest: int = 80) -> str:
    """Returns a short text for a value of any size, for a message."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | set | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return shorten(str(value)[: 4 * longest], longest)

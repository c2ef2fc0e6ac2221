"""Numbers from flags, files and keyword arguments: parsed and checked in one way."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from cmsf.utils.errors import BadInput
from cmsf.utils.text import short_repr

_INTEGER = re.compile(r"[+-]?\d{1,18}")
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf")
_LARGEST = 1e30
"""Of a number from a file: far above any measurement, and its sums and squares stay finite."""


def parse_number(text: str) -> int | float | str:
    """Returns the number that a text spells; any other text as it is, for a check to refuse."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text.lower()) else text


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns whether a value is a finite number; True and False are not."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def is_measurement(value: Any, largest: float = _LARGEST) -> TypeGuard[int | float]:
    """Returns whether a value of a file that anybody may have written can be computed with and drawn."""
    return is_number(value) and abs(value) <= largest


def check_integer(flag: str, value: Any, minimum: int, maximum: int, hint: str = "") -> int:
    """Returns the value if it is a whole number from `minimum` to `maximum`; else BadInput."""
    if not is_integer(value) or not minimum <= value <= maximum:
        raise _invalid(flag, value, f"a whole number from {minimum} to {maximum}", hint)
    return value


def check_number(flag: str, value: Any, minimum: float, maximum: float = math.inf, hint: str = "") -> float:
    """Returns the value if it is a number from `minimum` to `maximum`; else BadInput."""
    if not is_number(value) or not minimum <= value <= maximum:
        bounds = f"of at least {minimum}" if maximum == math.inf else f"from {minimum} to {maximum}"
        raise _invalid(flag, value, f"a number {bounds}", hint)
    return value


def _invalid(flag: str, value: Any, expected: str, hint: str) -> BadInput:
    return BadInput(f"invalid value {flag} {short_repr(value)}; expected {expected}" + (f", {hint}" if hint else ""))

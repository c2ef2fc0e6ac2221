"""Numbers from flags, files and keyword arguments: parsed and checked in one way."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from cmsf.utils.errors import BadInput
from cmsf.utils.text import short_repr

_INTEGER = re.compile(r"[+-]?\d{1,18}")
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf")


def parse_number(text: str) -> int | float | str:
    """Returns the number that a text spells; any other text as it is, for a check to refuse."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text.lower()) else text


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a finite number; True and False are not."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def check_integer(flag: str, value: Any, least: int, most: int, hint: str = "") -> int:
    """Returns the value if it is a whole number from `least` to `most`; else BadInput."""
    if not is_integer(value) or not least <= value <= most:
        raise _invalid(flag, value, f"a whole number from {least} to {most}", hint)
    return value


def check_number(flag: str, value: Any, least: float, most: float = math.inf, hint: str = "") -> float:
    """Returns the value if it is a number from `least` to `most`; else BadInput."""
    if not is_number(value) or not least <= value <= most:
        raise _invalid(
            flag,
            value,
            f"a number from {least} to {most}" if most < math.inf else f"a number of at least {least}",
            hint,
        )
    return value


def _invalid(flag: str, value: Any, expected: str, hint: str) -> BadInput:
    return BadInput(f"invalid value {flag} {short_repr(value)}; expected {expected}" + (f", {hint}" if hint else ""))

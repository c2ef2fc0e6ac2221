"""What happens to bytes on their way: truncated, flipped, repeated, spliced, overwritten."""

from __future__ import annotations

from random import Random

_TELLING = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\0\0\0",
    b"\x1b[2J",
    b"..",
    b"/",
    b'"',
    b"\n",
    b"%s",
    b"-1",
    b"99999999999999999999",
    b"nan",
    b"{}",
    b"[]",
    b"PK\x03\x04",
    b"\x89PNG\r\n\x1a\n",
    b"\xed\xa0\x80",
)


def mutated(content: bytes, random: Random) -> bytes:
    """One to four changes."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)):
        random.choice(_CHANGES)(changed, random)
    return bytes(changed)


def _truncate(content: bytearray, random: Random) -> None:
    del content[random.randint(0, len(content)) :]


def _flip(content: bytearray, random: Random) -> None:
    for _ in range(random.choice((1, 1, 3, 20))):
        if content:
            content[_place(content, random)] ^= 1 << random.randrange(8)


def _overwrite(content: bytearray, random: Random) -> None:
    new, place = random.choice(_TELLING), _place(content, random)
    content[place : place + len(new)] = new


def _insert(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    content[place:place] = random.choice(_TELLING) * random.choice((1, 1, 7))


def _delete(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    del content[place : place + random.choice((1, 4, 32))]


def _repeat(content: bytearray, random: Random) -> None:
    start = _place(content, random)
    piece = bytes(content[start : start + random.choice((8, 64, 512))])
    content[start:start] = piece * random.choice((1, 3))


def _place(content: bytearray, random: Random) -> int:
    """Anywhere, or among the first bytes, where headers are."""
    return random.randrange(max(1, min(len(content), random.choice((64, len(content) or 1)))))


_CHANGES = (_truncate, _flip, _flip, _overwrite, _insert, _delete, _repeat)

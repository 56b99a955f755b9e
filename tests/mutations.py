"""Damaged copies of messages, as a broken or hostile peer would send them; equal seeds damage equally."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# What announces much more than follows: msgpack's counts and lengths, protobuf's length-delimited fields, numbers.
_HUGE = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\xff" * 9 + b"\x01",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
)
_NESTING = (b"\x91", b"\x81\xa1v", b"\xdc\x00\x01", b"\x0b", b"\x0a\x7f")

Damage = Callable[[np.random.Generator, bytes], bytes]


def _at(rng: np.random.Generator, data: bytes) -> int:
    return int(rng.integers(len(data) + 1))


def flipped(rng: np.random.Generator, data: bytes) -> bytes:
    damaged = bytearray(data)
    for at in rng.integers(len(data), size=int(rng.integers(1, 4))).tolist() if data else ():
        damaged[at] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def cut(rng: np.random.Generator, data: bytes) -> bytes:
    return data[: _at(rng, data)]


def dropped(rng: np.random.Generator, data: bytes) -> bytes:
    start = _at(rng, data)
    return data[:start] + data[start + int(rng.integers(1, 9)) :]


def repeated(rng: np.random.Generator, data: bytes) -> bytes:
    start = _at(rng, data)
    end = start + int(rng.integers(1, 17))
    return data[:end] + data[start:end] * int(rng.integers(1, 4)) + data[end:]


def announcing_much(rng: np.random.Generator, data: bytes) -> bytes:
    start = _at(rng, data)
    huge = _HUGE[int(rng.integers(len(_HUGE)))]
    return data[:start] + huge + data[start + len(huge) * int(rng.integers(2)) :]


def nested(rng: np.random.Generator, data: bytes) -> bytes:
    start = _at(rng, data)
    return data[:start] + _NESTING[int(rng.integers(len(_NESTING)))] * int(rng.integers(1, 3000)) + data[start:]


def random(rng: np.random.Generator, data: bytes) -> bytes:
    return rng.bytes(int(rng.integers(0, 200)))


_DAMAGES: tuple[Damage, ...] = (flipped, flipped, cut, dropped, repeated, announcing_much, nested, random)


def damaged(rng: np.random.Generator, data: bytes) -> bytes:
    """`data` after one damage of any kind, or now and then two."""
    for _ in range(1 + int(rng.integers(5) == 0)):
        data = _DAMAGES[int(rng.integers(len(_DAMAGES)))](rng, data)
    return data

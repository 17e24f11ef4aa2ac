"""Bytes that somebody else might put where taskmesh looks: made from a seed, so that what failed can be made again."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

import msgpack

from taskmesh.codec import HEAD_BYTES

HEAD = b"\x011" + b"a" * 12 + b"00000001"


def bombs() -> list[bytes]:
    """Values of some kilobytes at most that claim to be more than any memory holds, or to be deeper than any stack."""
    claims = [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ]
    size = 60_000
    nested = [
        (b"\xdd" + struct.pack(">I", size - 8)) * (size // 5),
        (b"\xdf" + struct.pack(">I", size // 2 - 8) + b"\xc0") * (size // 6),
        b"\x91" * size,
        b"\x81\xc0" * (size // 2),
    ]
    filled = [value + b"\xc0" * (size - len(value) % size) for value in nested]
    return [*claims, *nested, *filled, b"\xc9\xff\xff\xff\xff\x07", _nested_sets(400), *_array_bombs()]


def _nested_sets(depth: int) -> bytes:
    """A set in a set, and so on: each level is a message of its own within the other."""
    inner = msgpack.packb([1])
    for _ in range(depth):
        inner = msgpack.packb([msgpack.ExtType(8, inner)])
    return bytes(inner)


def _array_bombs() -> list[bytes]:
    """Arrays and tensors that claim shapes of more elements than there are bytes in the world."""
    shapes: list[tuple[int, ...]] = [(2**62, 2**62), (2**63, 0), (2**40,), (0, 2**64 - 1), (1,) * 32]
    values = []
    for code, dtype in ((32, b"<f4"), (33, b"float32"), (32, b"O"), (32, b"i4,i4"), (32, b"(1000000,)f8")):
        for shape in shapes:
            head = struct.pack("<BcBB", 1, b"a", len(dtype), len(shape)) + dtype
            values.append(msgpack.packb(msgpack.ExtType(code, head + struct.pack(f"<{len(shape)}Q", *shape))))
    return values


class Damage:
    """Makes damaged bytes out of real ones."""

    def __init__(self, seed: int, samples: Sequence[bytes]) -> None:
        self.draw = random.Random(seed)
        self._samples = samples
        self._bombs = bombs()
        self._ways: list[Callable[[], bytes]] = [
            self.noise,
            self.cut,
            self.flipped,
            self.spliced,
            self.bomb,
            self.other_version,
            self.extension,
        ]

    def next(self) -> bytes:
        """One more, damaged in some way."""
        return self.draw.choice(self._ways)()

    def noise(self) -> bytes:
        """Random bytes, with a message's head or without."""
        return self.draw.choice((b"", HEAD)) + self.draw.randbytes(self.draw.randrange(300))

    def cut(self) -> bytes:
        """The beginning of a real one."""
        whole = self._sample()
        return whole[: self.draw.randrange(len(whole))]

    def flipped(self) -> bytes:
        """A real one with some bits the other way round."""
        changed = bytearray(self._sample())
        for _ in range(self.draw.randrange(1, 5)):
            changed[self.draw.randrange(len(changed))] ^= 1 << self.draw.randrange(8)
        return bytes(changed)

    def spliced(self) -> bytes:
        """The beginning of one and the end of another."""
        whole = self._sample()
        return self.cut() + whole[self.draw.randrange(len(whole)) :]

    def bomb(self) -> bytes:
        """A bomb behind a real head, or where an argument should be."""
        body = self.draw.choice((b"", b"\x92\xa3add\x91"))
        return self._sample()[:HEAD_BYTES] + body + self.draw.choice(self._bombs)

    def other_version(self) -> bytes:
        """A real one with another first byte."""
        return bytes([self.draw.choice((0, 2, 3, 7, 99, 255))]) + self._sample()[1:]

    def extension(self) -> bytes:
        """A value of an extension type, known or not, with garbage in it."""
        code = self.draw.choice((*range(11), 32, 33, 64, 127))
        garbage = self.draw.randbytes(self.draw.randrange(40))
        return HEAD + b"\x92\xa3add\x91" + bytes(msgpack.packb(msgpack.ExtType(code, garbage)))

    def _sample(self) -> bytes:
        return self.draw.choice(self._samples)

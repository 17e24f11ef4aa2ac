"""Messages and outcomes under a key: whoever does not have it can neither make them nor change them.

A signed message or outcome is the plain one of version 1 with version 2 in its first byte, and 16 bytes at its
end: keyed BLAKE2b over everything before them. The key of each Mesh is derived from its name, and what is signed
for one Mesh is refused by another; an outcome's signature covers the id of its message too, so that it cannot be
passed off as another's. Scripts read the head, which is the same in both versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from hmac import compare_digest
from typing import Protocol

from taskmesh.errors import DecodeError
from taskmesh.settings import UNSIGNED

SIGNATURE_BYTES = 16
DIGEST_BYTES = 16
_PLAIN, _SIGNED = b"\x01", b"\x02"


class Untrusted(DecodeError):
    """A message or outcome whose signature is missing or does not fit."""


class _Hash(Protocol):
    def copy(self) -> _Hash: ...
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


class Signer:
    """Signs with the first of a Mesh's keys and takes what any of them has signed. Any thread.

    Args:
        mesh: the Mesh's name.
        keys: as ``MeshSettings.signing_keys``; the word ``unsigned`` among them lets what is not signed in, and in
            the first place has nothing signed.
    """

    def __init__(self, mesh: str, keys: Sequence[str]) -> None:
        secrets = [_derive(mesh, key) for key in keys if key != UNSIGNED]
        self._messages = [_keyed(secret, b"message") for secret in secrets]
        self._outcomes = [_keyed(secret, b"outcome") for secret in secrets]
        self._takes_unsigned = UNSIGNED in keys
        self.signs = keys[0] != UNSIGNED

    def digest(self, blob: bytes) -> bytes:
        """What a message or outcome says of the blob that belongs to it; empty where nothing is signed."""
        return digest_of(blob) if self.signs else b""

    def sign(self, message: bytes) -> bytes:
        """A plain message with its signature."""
        if not self.signs:
            return message
        signed = _SIGNED + message[1:]
        mac = self._messages[0].copy()
        mac.update(signed)
        return signed + mac.digest()

    def read(self, message: bytes) -> bytes:
        """The plain message again.

        Raises:
            Untrusted: it is not signed, or not by one of the keys.
        """
        return self._read(self._messages, b"", message, "message")

    def sign_outcome(self, message_id: str, outcome: bytes) -> bytes:
        """A plain outcome of that message with its signature."""
        if not self.signs:
            return outcome
        signed = _SIGNED + outcome[1:]
        mac = self._outcomes[0].copy()
        mac.update(message_id.encode())
        mac.update(signed)
        return signed + mac.digest()

    def read_outcome(self, message_id: str, outcome: bytes) -> bytes:
        """The plain outcome again.

        Raises:
            Untrusted: it is not signed, or not by one of the keys for that message.
        """
        return self._read(self._outcomes, message_id.encode(), outcome, "outcome")

    def _read(self, keyed: Sequence[_Hash], of: bytes, data: bytes, kind: str) -> bytes:
        if data[:1] != _SIGNED:
            if self._takes_unsigned or data[:1] != _PLAIN:
                return data  # what is no wire value at all is refused by whoever reads it
            raise Untrusted(f"the {kind} is not signed, and this Mesh takes only signed ones")
        body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        for prepared in keyed:
            mac = prepared.copy()
            mac.update(of)
            mac.update(body)
            if compare_digest(mac.digest(), signature):
                return _PLAIN + body[1:]
        raise Untrusted(
            f"the {kind}'s signature fits none of this Mesh's keys: it was changed, or signed with another key"
        )


def digest_of(blob: bytes) -> bytes:
    """A blob's digest, as a signed message or outcome carries it."""
    return hashlib.blake2b(blob, digest_size=DIGEST_BYTES).digest()


def signer_of(mesh: str, keys: Sequence[str]) -> Signer | None:
    """The Mesh's signer; None where it has no keys, and signs and checks nothing."""
    return Signer(mesh, keys) if keys else None


def _derive(mesh: str, key: str) -> bytes:
    """The Mesh's own key. A key may be longer than the 64 bytes that BLAKE2b takes."""
    secret = hashlib.blake2b(
        key.encode("utf-8", "surrogateescape"), digest_size=32, person=b"taskmesh key"
    ).digest()
    return hashlib.blake2b(mesh.encode(), key=secret, digest_size=32, person=b"taskmesh mesh").digest()


def _keyed(secret: bytes, person: bytes) -> _Hash:
    return hashlib.blake2b(key=secret, digest_size=SIGNATURE_BYTES, person=person)

"""Keeping sensitive arguments out of failures: their text is replaced wherever it stands in one.

Found is what stands there as Python, JSON or a URL writes it, escaped any number of times. What was cut, hashed or
encoded otherwise is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from taskmesh.codec import decode_message, pack_value, unpack_value
from taskmesh.errors import DecodeError
from taskmesh.messages import Failure, Message
from taskmesh.tasks import REDACTED, TaskDefinition

Redact = Callable[[str], str]
SHORT = 4
LARGE = 500
_CONTROLS = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}


def redactor_of(task: TaskDefinition, message: Message, data: bytes) -> Redact | None:
    """What takes the sensitive arguments of a message out of a text; None where the task has none.

    Args:
        data: the message as it came: the handler may have changed what is in ``message``.
    """
    if not task.options.sensitive:
        return None
    texts = set(_texts_of(task, message))
    try:
        texts.update(_texts_of(task, decode_message(data)))
    except DecodeError:
        pass  # it was read once, so this cannot be
    ordered = sorted(texts, key=len, reverse=True)
    large = [text for text in ordered if len(text) > LARGE]
    patterns = "|".join(_pattern(text) for text in ordered if len(text) <= LARGE)
    small = re.compile(patterns) if patterns else None

    def redact(text: str) -> str:
        for secret in large:
            text = text.replace(secret, REDACTED)
        return small.sub(REDACTED, text) if small else text

    return redact


def redacted(failure: Failure, redact: Redact) -> Failure:
    """A failure without what ``redact`` finds in it."""
    return Failure(
        failure.type,
        redact(failure.message),
        redact(failure.traceback),
        redact_arguments(failure.args, redact),
    )


def redact_value(value: Any, redact: Redact) -> Any:
    """A value as it travels, without what ``redact`` finds in its parts."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return type(value)(redact_value(member, redact) for member in value)
    if isinstance(value, dict):
        return {redact_value(key, redact): redact_value(member, redact) for key, member in value.items()}
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return value if redact(text) == text else REDACTED


def redact_arguments(args: tuple[Any, ...], redact: Redact) -> tuple[Any, ...]:
    """The arguments of an exception, in the form in which they travel."""
    return tuple(redact_value(member, redact) for member in unpack_value(pack_value(args)))


def _texts_of(task: TaskDefinition, message: Message) -> Iterator[str]:
    for value in task.sensitive_values(message.args, message.kwargs):
        for text in _texts(value):
            if text.strip("*"):
                yield text


def _texts(value: Any) -> Iterator[str]:
    """The texts of a value's leaves. What says nothing (None, true, false) is left out."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        for member in value:
            yield from _texts(member)
    elif isinstance(value, str):
        yield value
        if len(value) > LARGE:
            yield from (repr(value)[1:-1], json.dumps(value)[1:-1], repr(repr(value))[2:-2])
    elif isinstance(value, bytes):
        yield from (repr(value)[2:-1], value.hex())
        yield from _texts(value.decode("utf-8", "replace"))
    else:
        yield from (str(value), repr(value))


def _pattern(text: str) -> str:
    """Finds a text in every way of escaping it.

    A short one and a number must stand as a word of its own: else the "a" of every word would go.
    """
    # A run of backslashes is found as one of any length: several beside each other would be tried in all combinations.
    found = "".join(map(_escaped, re.sub(r"\\+", r"\\", text)))
    is_word = len(text) < SHORT or text.replace(".", "", 1).lstrip("-").isdigit()
    return rf"(?<!\w){found}(?!\w)" if is_word else found


def _escaped(character: str) -> str:
    """One character as it is, behind backslashes, or as a URL writes it."""
    plain = re.escape(character)
    if character.isascii() and character.isalnum():
        return plain
    point = ord(character)
    octets = character.encode("utf-8", "surrogatepass")
    ways = [rf"\\*{plain}", "".join(f"%{octet:02X}" for octet in octets)]
    if character == "\\":
        ways[0] = r"\\+"
    elif character == " ":
        ways.append(r"\+")
    elif character in _CONTROLS:
        ways.append(rf"\\+{_CONTROLS[character]}")
    if not (character.isascii() and character.isprintable()):
        units = [f"{unit:04x}" for unit in _utf16(point)]
        ways += [rf"\\+x{point:02x}", rf"\\+U{point:08x}", "".join(rf"\\+u{unit}" for unit in units)]
        ways.append("".join(rf"\\+x{octet:02x}" for octet in octets))
    return f"(?:{'|'.join(ways)})"


def _utf16(point: int) -> list[int]:
    """How JSON numbers a character: above the first 65,536 by two."""
    if point < 0x10000:
        return [point]
    high, low = divmod(point - 0x10000, 0x400)
    return [0xD800 + high, 0xDC00 + low]

"""Every Redis key, and the hash tag that keeps together what one script touches.

A key reads ``taskmesh:{<mesh>:<queue>:<partition>}:<what>``. Everything between the braces is hashed, so all
keys of one partition lie in one slot of a cluster. A training run has a tag of its own, and the chunks of its
versions are spread over as many tags as there are chunk groups.
"""

from __future__ import annotations

import re

from taskmesh.errors import ConfigurationError
from taskmesh.messages import Priority

GROUP = b"workers"
RETURNED = b"returned"  # the consumer that holds what was handed back, for anybody to take
SUSPECTS = (
    b"suspects"  # the consumer that holds what two workers died with, until there is room to run it apart
)
ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it may stand in a key.

    Raises:
        ConfigurationError: it is empty, longer than 100 characters or has others than letters, digits, ``_ . -``.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} name {name!r}: use 1 to 100 letters, digits, '_', '.' or '-' (it becomes part of Redis keys)"
        )
    return name


def is_name(name: str) -> bool:
    """Whether ``check_name`` would take it."""
    return _NAME.fullmatch(name) is not None


class PartitionKeys:
    """The keys of one partition of one queue."""

    __slots__ = (
        "cancelled",
        "control",
        "dead",
        "delayed",
        "known",
        "lanes",
        "parked",
        "partition",
        "prefix",
        "queue",
        "tag",
        "workers",
    )

    def __init__(self, mesh: str, queue: str, partition: int) -> None:
        self.queue = queue
        self.partition = partition
        self.tag = f"{mesh}:{queue}:{partition}".encode()
        self.prefix = prefix = b"taskmesh:{" + self.tag + b"}:"
        self.lanes = tuple(prefix + b"tasks:" + lane.name.lower().encode() for lane in Priority)
        self.delayed = prefix + b"delayed"
        self.dead = prefix + b"dead"
        self.parked = prefix + b"parked"
        self.workers = prefix + b"workers"
        self.known = prefix + b"known"
        self.cancelled = prefix + b"cancelled"
        self.control = prefix + b"control"

    def settles(self, worker: bytes) -> bytes:
        return self.prefix + b"settles:" + worker

    def result(self, message_id: str) -> bytes:
        return self.prefix + b"result:" + message_id.encode()

    def producer(self, producer: str) -> bytes:
        return self.prefix + b"producer:" + producer.encode()

    def replies(self, producer: str) -> bytes:
        return self.prefix + b"replies:" + producer.encode()

    def blob(self, message_id: str, kind: str, chunk: int) -> bytes:
        """``kind`` is "args" or "result-" and the name of a run."""
        return self.prefix + f"blob:{message_id}:{kind}:{chunk}".encode()


class RunKeys:
    """The keys of one training run."""

    __slots__ = ("_prefix", "current", "garbage", "history", "lease", "ledger", "mesh", "run", "tag")

    def __init__(self, mesh: str, run: str) -> None:
        self.mesh = mesh
        self.run = run
        self._prefix = f"{mesh}:run:{run}"
        self.tag = self._prefix.encode()
        prefix = b"taskmesh:{" + self.tag + b"}:"
        self.lease = prefix + b"lease"
        self.current = prefix + b"current"
        self.history = prefix + b"versions"
        self.garbage = prefix + b"garbage"
        self.ledger = prefix + b"ledger"

    def chunk(self, version: int, token: int, index: int) -> bytes:
        """A piece of a kept version, spread over 16 tags; the fencing token keeps two masters' pieces apart."""
        return f"taskmesh:{{{self._prefix}:{index % 16}}}:chunk:{version}:{token}:{index}".encode()

    def transient(self, version: int, token: int, index: int) -> bytes:
        """A piece of a version that is not kept, likewise."""
        return f"taskmesh:{{{self._prefix}:{index % 16}}}:transient:{version}:{token}:{index}".encode()

    def memory(self, shard: int, name: str, index: int) -> bytes:
        """A piece of what a shard's compression remembers, on its way from one worker to the next."""
        return f"taskmesh:{{{self._prefix}:{shard % 16}}}:memory:{shard}:{name}:{index}".encode()

    @property
    def notes(self) -> bytes:
        """Word of pieces of gradients that have been written."""
        return f"taskmesh:{{{self._prefix}:0}}:notes".encode()

    def gradient(self, version: int, shard: int, attempt: str, index: int) -> bytes:
        """A piece of a shard's gradient; ``attempt`` names one delivery of the task that computed it."""
        tag = f"{self._prefix}:{shard % 16}"
        return f"taskmesh:{{{tag}}}:gradient:{version}:{shard}:{attempt}:{index}".encode()

    def reduced(self, version: int, attempt: str, index: int) -> bytes:
        """A piece of a step's mean gradient that a worker has reduced; ``attempt`` names one delivery, likewise."""
        return f"taskmesh:{{{self._prefix}:{index % 16}}}:reduced:{version}:{attempt}:{index}".encode()


def tag_of(key: bytes) -> bytes:
    """The hash tag of a key that was built here."""
    return key[key.index(b"{") + 1 : key.index(b"}")]


def check_id(message_id: str) -> str:
    """Return ``message_id`` if a submission can have made it.

    Raises:
        ConfigurationError: it cannot.
    """
    if len(message_id) != 20 or not set(message_id) <= set(ID_DIGITS):
        raise ConfigurationError(f"{message_id!r} is no task's id: they have 20 letters and digits")
    return message_id


def partition_digits(partition: int) -> str:
    """A partition's number as it stands in message ids: two digits in base 62."""
    high, low = divmod(partition, len(ID_DIGITS))
    return ID_DIGITS[high] + ID_DIGITS[low]


def partition_of(message_id: str) -> int:
    """The number of the partition that a message was put in."""
    return ID_DIGITS.index(message_id[12]) * len(ID_DIGITS) + ID_DIGITS.index(message_id[13])


def reply_producer(message_id: str) -> str:
    """The producer that a message's outcome is pushed to."""
    return message_id[:12]

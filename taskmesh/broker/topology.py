"""Who serves a hash tag: the one server, the primary that the sentinels name, or a node of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

from redis.crc import key_slot

from taskmesh.broker.address import Address, Node
from taskmesh.errors import BrokerUnavailable

ANSWER_TIMEOUT = 2.0
PATIENCE = 0.2
_random = Random()  # not the module's: handlers may have seeded that one, and count on it
T = TypeVar("T")


class Ask(Protocol):
    """One command on a connection made for it; with a node, the arguments' own host and port are left aside."""

    async def __call__(
        self, arguments: dict[str, Any], node: Node | None, *command: str, timeout: float = ...
    ) -> Any: ...


class Topology(Protocol):
    """Where the nodes are. ``read`` finds out, and again after trouble."""

    def node_of(self, tag: bytes) -> Node | None:
        """The node that serves the tag; None for the address itself.

        Raises:
            BrokerUnavailable: none does.
        """
        ...

    def serves(self, node: Node | None) -> bool:
        """Whether the node is a primary, as far as is known."""
        ...

    async def read(self, ask: Ask) -> None:
        """Find out where the nodes are now.

        Raises:
            BrokerError: nobody tells.
        """
        ...


class Single:
    """One server at one address."""

    def node_of(self, tag: bytes) -> Node | None:
        return None

    def serves(self, node: Node | None) -> bool:
        return True

    async def read(self, ask: Ask) -> None:
        pass


class Sentinels:
    """A primary with replicas, watched by sentinels: of their answers, the one after the latest failover counts."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._known: tuple[int, Node] | None = None

    def node_of(self, tag: bytes) -> Node | None:
        if self._known is None:
            raise BrokerUnavailable(f"the sentinels of {self._address.where} have not named a primary yet")
        return self._known[1]

    def serves(self, node: Node | None) -> bool:
        return self._known is not None and node == self._known[1]

    async def read(self, ask: Ask) -> None:
        asked = (self._ask_one(ask, node) for node in self._address.sentinels)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        named = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not named:
            reasons = "; ".join(str(answer) for answer in answers)
            raise BrokerUnavailable(f"no sentinel of {self._address.where} names a primary: {reasons}")
        self._known = max(named)

    async def has_moved(self, ask: Ask) -> bool:
        """Whether a sentinel, any of them, knows of a later failover.

        Raises:
            BrokerError: it gives no answer.
        """
        answer = await self._ask_one(ask, _random.choice(self._address.sentinels))
        return self._known is None or answer > self._known

    async def _ask_one(self, ask: Ask, node: Node) -> tuple[int, Node]:
        """The epoch of the latest failover that this sentinel knows of, and the primary since then."""
        arguments = self._address.sentinel_arguments or {}
        reply = await ask(
            arguments, node, "SENTINEL", "MASTER", self._address.service, timeout=ANSWER_TIMEOUT
        )
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        return int(fields[b"config-epoch"]), (fields[b"ip"].decode(), int(fields[b"port"]))


class Cluster:
    """The slots of a Redis Cluster and their primaries."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._slots: list[tuple[int, int, Node]] = []

    def node_of(self, tag: bytes) -> Node | None:
        slot = key_slot(tag)
        for first, last, node in self._slots:
            if first <= slot <= last:
                return node
        raise BrokerUnavailable(f"slot {slot} of the cluster at {self._address.where} is served by no node")

    def serves(self, node: Node | None) -> bool:
        return any(node == primary for _, _, primary in self._slots)

    async def read(self, ask: Ask) -> None:
        nodes: list[Node | None] = list({node for _, _, node in self._slots})
        _random.shuffle(nodes)
        self._slots = await _first_of([self._ask_one(ask, node) for node in [*nodes, None]])

    async def _ask_one(self, ask: Ask, node: Node | None) -> list[tuple[int, int, Node]]:
        arguments = self._address.arguments
        reply = await ask(arguments, node, "CLUSTER", "SLOTS", timeout=ANSWER_TIMEOUT)
        seed = node[0] if node else arguments.get("host", "localhost")
        slots = [
            (int(first), int(last), (primary[0].decode() or seed, int(primary[1])))
            for first, last, primary, *_ in reply
        ]
        if not slots:
            raise BrokerUnavailable(f"the cluster at {self._address.where} serves no slot")
        return slots


async def _first_of(questions: Sequence[Coroutine[Any, Any, T]]) -> T:
    """The first answer; a question is put when the one before has failed, or has had no answer for a while.

    Raises:
        BrokerError: all have failed; the last one's error.
    """
    waiting: set[asyncio.Task[T]] = set()
    trouble: BaseException | None = None
    left = list(questions)
    try:
        while left or waiting:
            if left:
                waiting.add(asyncio.ensure_future(left.pop(0)))
            done, waiting = await asyncio.wait(
                waiting, timeout=PATIENCE if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for question in done:
                trouble = question.exception()
                if trouble is None:
                    return question.result()
        assert trouble is not None
        raise trouble
    finally:
        for question in waiting:
            question.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for unasked in left:
            unasked.close()

"""Large values in pieces of about 1 MiB, each under a key and tag of its own, spread over the nodes of a cluster.

Writing, reading and unlinking a chunk may all be done twice, so every call here goes on trying while the server
is away, as long as the ``Caller`` does. What is large goes over sockets of its own and straight between them and the
caller's memory; what is small goes with everything else.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from taskmesh.broker.caller import Caller, pause_before
from taskmesh.broker.link import Argument, Moved
from taskmesh.broker.sockets import Target
from taskmesh.errors import BrokerError, BrokerUnavailable
from taskmesh.keys import tag_of
from taskmesh.settings import KIB, MIB

CHUNK_BYTES = MIB
LARGE_BYTES = 128 * KIB  # from here on a thread costs less than the copies that it spares
WINDOW = 8
TELL_OF = 4  # pieces at once
WINDOW_TIMEOUT = 30.0
_UNLINK_AT_ONCE = 500
R = TypeVar("R")


def split(data: memoryview) -> list[memoryview]:
    """Cut a value into chunks; an empty value has none."""
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


async def put(
    caller: Caller,
    keys: Sequence[bytes],
    pieces: Sequence[memoryview],
    ttl_ms: int | None = None,
    *,
    once: bool = False,
) -> None:
    """Write each piece under its key. The pieces must not change meanwhile.

    Args:
        once: a key that is there is left as it is, with its time to live.

    Raises:
        BrokerFull: the server has no room; some pieces may be written.
        BrokerUnavailable: it stayed away; likewise.
    """
    if sum(piece.nbytes for piece in pieces) < LARGE_BYTES:
        how: tuple[Argument, ...] = (*(() if ttl_ms is None else ("PX", ttl_ms)), *(("NX",) if once else ()))
        await _each(
            caller, [(key, ("SET", key, piece, *how)) for key, piece in zip(keys, pieces, strict=True)]
        )
        return

    async def put_some(places: Sequence[int]) -> None:
        commands = [_set(keys[place], pieces[place], ttl_ms, once=once) for place in places]
        await caller.server.on_socket(tag_of(keys[places[0]]), lambda wire: wire.send_many(commands))

    await _persist(caller, lambda: _on_nodes(caller, keys, put_some))


async def get(
    caller: Caller, keys: Sequence[bytes], target: Target, taken: Callable[[int], None], size_bytes: int
) -> None:
    """Read what is under each key into the memory that ``target`` gives for it.

    Args:
        target: from the place of a key and the size of its value to memory of that size, or None for a value that
            is not wanted. It may be asked twice, and from other threads.
        taken: told the place of each value when it is there; likewise.
        size_bytes: how much is expected in all.

    Raises:
        BrokerUnavailable: the server stayed away.
    """
    if size_bytes < LARGE_BYTES:
        replies = await _each(caller, [(key, ("GET", key)) for key in keys])
        for place, reply in enumerate(replies):
            into = None if reply is None else target(place, len(reply))
            if into is not None:
                into.cast("B")[:] = reply
                taken(place)
        return

    async def get_some(places: Sequence[int]) -> None:
        chosen = [keys[place] for place in places]
        await caller.server.on_socket(
            tag_of(chosen[0]),
            lambda wire: wire.get_many(
                chosen, lambda at, size: target(places[at], size), lambda at: taken(places[at])
            ),
        )

    await _persist(caller, lambda: _on_nodes(caller, keys, get_some))


class Upload:
    """Pieces that are written as they come. ``add``, then ``end``; ``run`` meanwhile.

    A piece may be added again, changed. No piece may change after it was added last, until ``run`` has returned.

    Args:
        key_of: the key of each piece, by its place.
        tell: makes the command that tells whoever is interested of pieces that are there, by their places. It is
            not sent in a cluster, whose nodes hold some of them each.
    """

    def __init__(
        self,
        caller: Caller,
        key_of: Callable[[int], bytes],
        ttl_ms: int | None,
        tell: Callable[[Sequence[int]], Sequence[bytes]],
    ) -> None:
        self._caller = caller
        self._key_of = key_of
        self._tell = tell
        self._ttl_ms = ttl_ms
        self._pieces: dict[int, memoryview] = {}
        self._coming: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add(self, place: int, piece: memoryview) -> None:
        """A piece is there. Any thread."""
        self._pieces[place] = piece
        self._coming.put(place)

    def end(self) -> None:
        """No more will come. Any thread."""
        self._coming.put(None)
        self._loop.call_soon_threadsafe(self._ended.set)

    async def run(self) -> None:
        """Write until the end.

        Raises:
            BrokerFull: the server has no room; some pieces may be written.
            BrokerUnavailable: it stayed away; likewise.
        """
        if not self._caller.server.is_cluster:
            try:
                await self._caller.server.on_socket(
                    tag_of(self._key_of(0)), lambda wire: wire.send_many(self._commands())
                )
                return
            except (BrokerUnavailable, Moved):
                pass  # once more, all of them
        await self._ended.wait()
        places = sorted(self._pieces)
        await put(
            self._caller,
            [self._key_of(place) for place in places],
            [self._pieces[place] for place in places],
            self._ttl_ms,
        )

    def _commands(self) -> Iterator[Sequence[bytes | memoryview]]:
        untold: list[int] = []
        while (place := self._coming.get()) is not None:
            yield _set(self._key_of(place), self._pieces[place], self._ttl_ms)
            untold.append(place)
            if len(untold) == TELL_OF:
                yield self._tell(untold)
                untold = []


def _set(
    key: bytes, piece: memoryview, ttl_ms: int | None, *, once: bool = False
) -> Sequence[bytes | memoryview]:
    life = () if ttl_ms is None else (b"PX", b"%d" % ttl_ms)
    return (b"SET", key, piece, *life, *((b"NX",) if once else ()))


async def _on_nodes(
    caller: Caller, keys: Sequence[bytes], work: Callable[[list[int]], Awaitable[None]]
) -> None:
    """Do something for the places of each node's keys, side by side."""
    by_node: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        node = caller.server.node(tag_of(key)) if caller.server.is_cluster else ""
        by_node.setdefault(node, []).append(place)
    done = await asyncio.gather(*map(work, by_node.values()), return_exceptions=True)
    for error in done:
        if error is not None:
            raise error


async def are_there(caller: Caller, keys: Sequence[bytes]) -> list[bool]:
    """Whether each key is there, whatever is under it.

    Raises:
        BrokerUnavailable: the server stayed away.
    """
    return [bool(reply) for reply in await _each(caller, [(key, ("EXISTS", key)) for key in keys])]


async def make_last(caller: Caller, keys: Sequence[bytes]) -> list[bool]:
    """Take the keys' times to live away; whether each key is there.

    Raises:
        BrokerUnavailable: the server stayed away; some may have theirs still.
    """
    await _each(caller, [(key, ("PERSIST", key)) for key in keys])
    return await are_there(caller, keys)


async def unlink(caller: Caller, keys: Sequence[bytes]) -> None:
    """Remove the keys, whatever is under them.

    Raises:
        BrokerUnavailable: the server stayed away; some may be left.
    """
    if not caller.server.is_cluster:
        batches = [tuple(keys[at : at + _UNLINK_AT_ONCE]) for at in range(0, len(keys), _UNLINK_AT_ONCE)]
        await _each(caller, [(batch[0], ("UNLINK", *batch)) for batch in batches])
        return
    await _each(caller, [(key, ("UNLINK", key)) for key in keys])


async def _each(caller: Caller, commands: Sequence[tuple[bytes, tuple[Argument, ...]]]) -> list[Any]:
    """Run each command on the node of its key, in windows."""
    by_tag: dict[bytes, list[int]] = {}
    for place, (key, _) in enumerate(commands):
        by_tag.setdefault(tag_of(key) if caller.server.is_cluster else b"", []).append(place)
    replies: list[Any] = [None] * len(commands)

    async def run(places: Sequence[int]) -> None:
        for at in range(0, len(places), WINDOW):
            window = places[at : at + WINDOW]
            batch = [commands[place][1] for place in window]
            tag = tag_of(commands[window[0]][0])
            for place, reply in zip(window, await call_many(caller, tag, batch), strict=True):
                replies[place] = reply

    await asyncio.gather(*(run(places) for places in by_tag.values()))
    return replies


async def call_many(caller: Caller, tag: bytes, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
    """Commands on the tag's node, all of them again while the server is away. For such as may be done twice.

    Raises:
        BrokerUnavailable: it stayed away.
        BrokerError: an answer is an error.
    """

    async def attempt() -> list[Any]:
        replies = await caller.server.link(tag).call_many(commands, WINDOW_TIMEOUT)
        for reply in replies:
            if isinstance(reply, BrokerError):
                raise reply
        return replies

    return await _persist(caller, attempt)


async def _persist(caller: Caller, attempt: Callable[[], Awaitable[R]]) -> R:
    give_up_at = caller.clock.monotonic() + caller.retry_for
    tries = 0
    while True:
        try:
            return await attempt()
        except (BrokerUnavailable, Moved) as error:
            pause = pause_before(tries)
            if caller.clock.monotonic() + pause > give_up_at:
                raise (
                    error if isinstance(error, BrokerUnavailable) else BrokerUnavailable(str(error))
                ) from None
        tries += 1
        try:
            await caller.server.refresh()
        except BrokerError:
            pass  # the next try tells what is wrong
        await asyncio.sleep(pause)

"""Where a client's outcomes arrive: one reply stream in each partition, one blocking read for every await.

The stream is made and kept alive by the client and never made again by a settle, so that nothing is left of a
client that has died. A push may be missed (a lost connection, a trimmed stream): whoever waits looks at the
record from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from taskmesh.broker.caller import pause_before
from taskmesh.broker.streams import Partition
from taskmesh.errors import BrokerError
from taskmesh.settings import MIB

log = logging.getLogger("taskmesh.results")
STREAM_TTL_MS = 60_000
BLOCK_MS = 5000
UPKEEP_SECONDS = 5.0
UPKEEP_ENTRIES = 256
MAX_RECENT = 20_000
MAX_RECENT_BYTES = 32 * MIB
FIRST_RECHECK = 1.0
LONGEST_RECHECK = 10.0


class Inbox:
    """One client's outcomes from one partition."""

    def __init__(self, partition: Partition, producer: str) -> None:
        self._partition = partition
        self._key = partition.keys.replies(producer)
        self._link = partition.caller.server.dedicated(partition.keys.tag)
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._evicted = False
        self._reader: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Make the stream; to be called before what is awaited is submitted."""
        if self._reader is not None:
            return
        async with self._opening:
            if self._reader is None:
                last = await self._make_stream()
                self._reader = asyncio.create_task(self._read(last), name="taskmesh inbox")

    async def close(self) -> None:
        """Stop reading. What still waits goes on by its own looks at the record."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._link.close()

    def future(self, message_id: str) -> asyncio.Future[bytes]:
        """Resolves with the outcome's bytes when they are pushed, or found by ``recheck``."""
        future = self._waiting.get(message_id)
        if future is None or future.cancelled():
            future = asyncio.get_running_loop().create_future()
            data = self._recent.get(message_id)
            if data is not None:
                future.set_result(data)
            else:
                self._waiting[message_id] = future
        return future

    async def wait(self, message_id: str, pushed_here: bool = True) -> bytes:
        """The outcome's bytes, however long it takes; cancel it to stop waiting.

        ``pushed_here`` says that this client submitted the message, so that the outcome will be pushed to it.
        """
        future = self.future(message_id)
        pause = FIRST_RECHECK if pushed_here and not self._evicted else 0.0
        while not future.done():
            if pause:
                await asyncio.wait([future], timeout=pause)
            if not future.done():
                await self.recheck([message_id])
            pause = min(
                LONGEST_RECHECK if pushed_here else 0.5,
                max(FIRST_RECHECK if pushed_here else 0.02, pause * 2),
            )
        return future.result()

    async def recheck(self, message_ids: Sequence[str]) -> None:
        """Look at the records of outcomes whose push may have been missed."""
        keys = self._partition.keys
        try:
            replies = await self._partition.caller.server.link(keys.tag).call_many(
                [("GET", keys.result(message_id)) for message_id in message_ids]
            )
        except BrokerError as error:
            log.debug("looking at records: %s", error)
            return
        for message_id, data in zip(message_ids, replies, strict=True):
            if isinstance(data, bytes):
                self._deliver(message_id, data)

    def forget(self, message_id: str) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(message_id, None)

    def _deliver(self, message_id: str, data: bytes) -> None:
        future = self._waiting.pop(message_id, None)
        if future is not None and not future.done():
            future.set_result(data)
        if message_id in self._recent:
            return
        self._recent[message_id] = data
        self._recent_bytes += len(data)
        while len(self._recent) > MAX_RECENT or self._recent_bytes > MAX_RECENT_BYTES:
            _, evicted = self._recent.popitem(last=False)
            self._recent_bytes -= len(evicted)
            self._evicted = True

    async def _make_stream(self) -> bytes:
        tag = self._partition.keys.tag
        last: bytes = await self._partition.caller.command(
            tag, "XADD", self._key, "MAXLEN", 1, "*", "opened", ""
        )
        await self._partition.caller.command(tag, "PEXPIRE", self._key, STREAM_TTL_MS)
        return last

    async def _read(self, last: bytes) -> None:
        loop = asyncio.get_running_loop()
        upkeep_at = loop.time() + UPKEEP_SECONDS
        entries_since = 0
        failures = 0
        while True:
            commands: list[tuple[bytes | str | int, ...]] = []
            upkeep = entries_since >= UPKEEP_ENTRIES or loop.time() >= upkeep_at
            if upkeep:
                commands += [("XTRIM", self._key, "MINID", last), ("PEXPIRE", self._key, STREAM_TTL_MS)]
            commands.append(("XREAD", "COUNT", 1000, "BLOCK", BLOCK_MS, "STREAMS", self._key, last))
            try:
                replies = await self._link.call_many(commands, timeout=BLOCK_MS / 1000 + 5.0)
                for reply in replies:
                    if isinstance(reply, BrokerError):
                        raise reply
                if upkeep:
                    upkeep_at, entries_since = loop.time() + UPKEEP_SECONDS, 0
                    if replies[1] == 0:  # the server has forgotten the stream
                        last = await self._make_stream()
                        await self._recheck_all()
                        continue
                failures = 0
            except BrokerError as error:
                log.debug("reading replies: %s", error)
                await asyncio.sleep(pause_before(failures))
                failures += 1
                upkeep_at = 0.0
                if failures == 1:
                    self._link.drop("lost")
                else:
                    await self._try_refresh()
                await self._recheck_all()
                continue
            if not replies[-1]:
                continue
            for entry_id, fields in replies[-1][0][1]:
                last = entry_id
                entries_since += 1
                for place in range(0, len(fields), 2):
                    self._deliver(fields[place].decode(), fields[place + 1])

    async def _try_refresh(self) -> None:
        try:
            await self._partition.caller.server.refresh()
        except BrokerError as error:
            log.debug("topology: %s", error)

    async def _recheck_all(self) -> None:
        waiting = list(self._waiting)
        for first in range(0, len(waiting), 500):
            await self.recheck(waiting[first : first + 500])

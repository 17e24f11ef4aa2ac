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
from taskmesh.broker.scripts import OPEN
from taskmesh.broker.streams import Partition
from taskmesh.errors import BrokerError, ResultUnavailable
from taskmesh.results.search import Search
from taskmesh.settings import MIB

log = logging.getLogger("taskmesh.results")
STREAM_TTL_MS = 60_000
BLOCK_MS = 5000
UPKEEP_SECONDS = 5.0
UPKEEP_ENTRIES = 256
MAX_RECENT = 20_000
MAX_RECENT_BYTES = 32 * MIB
RECHECK_AFTER = 1.0
LONGEST_RECHECK = 10.0
POLL_AFTER = 0.02
LONGEST_POLL = 0.5
LOOKS_AT_ONCE = 500


class _Wait:
    """Somebody waiting for one outcome, and when the record is looked at next."""

    __slots__ = ("due", "future", "longest", "pause")

    def __init__(self, future: asyncio.Future[bytes], now: float, pause: float, longest: float) -> None:
        self.future = future
        self.pause = pause
        self.longest = longest
        self.due = now + pause


class Inbox:
    """One client's outcomes from one partition.

    Attributes:
        pushed: outcomes that arrived as pushes; a message that is settled once is pushed once.
        repeats: pushes of outcomes that had been pushed before, as far as they are remembered.
        search: tells whether anything is left of a message.
    """

    def __init__(self, partition: Partition, producer: str) -> None:
        self._partition = partition
        self.search = Search(partition)
        self._key = partition.keys.replies(producer)
        self._link = partition.caller.server.dedicated(partition.keys.tag)
        self._waits: dict[str, list[_Wait]] = {}
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._pushed: OrderedDict[str, None] = OrderedDict()
        self._evicted = False
        self._closed = False
        self.pushed = 0
        self.repeats = 0
        self._reader: asyncio.Task[None] | None = None
        self._looker: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
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
        """Stop reading; whoever still waits gets ResultUnavailable."""
        self._closed = True
        tasks = [task for task in (self._reader, self._looker) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waits in self._waits.values():
            for wait in waits:
                if not wait.future.done():
                    wait.future.set_exception(ResultUnavailable("the Mesh was left before the outcome came"))
        self._waits.clear()
        await self._link.close()

    async def wait(self, message_id: str, pushed_here: bool = True) -> bytes:
        """The outcome's bytes, however long it takes; cancel it to stop waiting.

        Raises:
            ResultUnavailable: the inbox was closed.
        """
        future = self.expect(message_id, pushed_here)
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                self.forget(message_id, future)

    def expect(self, message_id: str, pushed_here: bool = True) -> asyncio.Future[bytes]:
        """A future of the outcome's bytes; ``forget`` it to stop waiting.

        ``pushed_here`` says that this client submitted the message, so that the outcome will be pushed to it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        data = self._recent.get(message_id)
        if data is not None:
            future.set_result(data)
            return future
        if self._closed:
            future.set_exception(ResultUnavailable("the Mesh was left before the outcome came"))
            return future
        if pushed_here:
            # A push that was evicted unread will not come again: look at once.
            wait = _Wait(future, loop.time(), 0.0 if self._evicted else RECHECK_AFTER, LONGEST_RECHECK)
        else:
            wait = _Wait(future, loop.time(), 0.0, LONGEST_POLL)
        self._waits.setdefault(message_id, []).append(wait)
        if self._looker is None:
            self._looker = asyncio.create_task(self._look_again(), name="taskmesh inbox looks")
        if not wait.pause:
            self._look_now.set()
        return future

    def forget(self, message_id: str, future: asyncio.Future[bytes]) -> None:
        """Stop waiting for an outcome."""
        waits = [wait for wait in self._waits.get(message_id, ()) if wait.future is not future]
        if waits:
            self._waits[message_id] = waits
        else:
            self._waits.pop(message_id, None)

    def void(self, message_id: str) -> None:
        """Remember no outcome of this message."""
        before = self._recent.pop(message_id, None)
        if before is not None:
            self._recent_bytes -= len(before)

    def _deliver(self, message_id: str, data: bytes) -> None:
        for wait in self._waits.pop(message_id, ()):
            if not wait.future.done():
                wait.future.set_result(data)
        self.void(message_id)  # a dead letter that was put back has another outcome than before
        self._recent[message_id] = data
        self._recent_bytes += len(data)
        while len(self._recent) > MAX_RECENT or self._recent_bytes > MAX_RECENT_BYTES:
            _, evicted = self._recent.popitem(last=False)
            self._recent_bytes -= len(evicted)
            self._evicted = True

    async def _look_again(self) -> None:
        """Look at the records of those who have waited long: their push may have been missed."""
        loop = asyncio.get_running_loop()
        while True:
            self._look_now.clear()
            now = loop.time()
            due: list[str] = []
            soonest = now + RECHECK_AFTER
            for message_id, waits in self._waits.items():
                for wait in waits:
                    if wait.due <= now:
                        due.append(message_id)
                        wait.pause = min(wait.longest, max(POLL_AFTER, wait.pause * 2))
                        wait.due = now + wait.pause
                    soonest = min(soonest, wait.due)
            for first in range(0, len(due), LOOKS_AT_ONCE):
                await self._look(due[first : first + LOOKS_AT_ONCE])
            try:
                async with asyncio.timeout_at(max(soonest, now + POLL_AFTER / 2)):
                    await self._look_now.wait()
            except TimeoutError:
                pass

    async def _look(self, message_ids: Sequence[str]) -> None:
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

    async def _make_stream(self) -> bytes:
        last: bytes = await self._partition.caller.run(
            OPEN, self._partition.keys.tag, [self._key], (STREAM_TTL_MS,)
        )
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
                        await self._look_at_all()
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
                await self._look_at_all()
                continue
            if not replies[-1]:
                continue
            for entry_id, fields in replies[-1][0][1]:
                last = entry_id
                entries_since += 1
                self.pushed += len(fields) // 2
                for place in range(0, len(fields), 2):
                    message_id = fields[place].decode("ascii", "replace")
                    self.repeats += message_id in self._pushed
                    self._pushed[message_id] = None
                    self._deliver(message_id, fields[place + 1])
                while len(self._pushed) > MAX_RECENT:
                    self._pushed.popitem(last=False)
            await asyncio.sleep(0)  # who waited goes first

    async def _try_refresh(self) -> None:
        try:
            await self._partition.caller.server.refresh()
        except BrokerError as error:
            log.debug("topology: %s", error)

    async def _look_at_all(self) -> None:
        waiting = list(self._waits)
        for first in range(0, len(waiting), LOOKS_AT_ONCE):
            await self._look(waiting[first : first + LOOKS_AT_ONCE])

"""Scripts and commands by hash tag, with the retries that are safe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from random import Random
from typing import Any

from taskmesh.broker.connect import Server
from taskmesh.broker.link import Argument, Link, Moved, ScriptMissing
from taskmesh.broker.scripts import Script
from taskmesh.clock import Clock
from taskmesh.errors import BrokerError, BrokerUnavailable

FIRST_PAUSE = 0.02
_random = Random()  # not the module's: handlers may have seeded that one, and count on it
LONGEST_PAUSE = 1.0


def pause_before(attempt: int) -> float:
    """Seconds before the next try: exponential, with full jitter; ``attempt`` counts from 0."""
    return _random.uniform(0.5, 1.0) * min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**attempt)


class Caller:
    """Runs scripts on the node that serves their tag.

    Every script is idempotent (numbered, or the same by nature), so a call whose reply was lost may be made again;
    plain commands are retried only where nothing was done.
    """

    def __init__(self, server: Server, clock: Clock, retry_for: float) -> None:
        self.server = server
        self.clock = clock
        self.retry_for = retry_for

    async def run(
        self,
        script: Script,
        tag: bytes,
        keys: Sequence[bytes],
        arguments: Sequence[Argument],
        *,
        retry_for: float | None = None,
    ) -> Any:
        """Run one script; try again for so long while the server is away.

        Raises:
            BrokerUnavailable: it stayed away; whether the last try was done is not known.
            BrokerError: the server's answer is an error.
        """
        command = self.prepare(script, keys, arguments)
        patience = self.retry_for if retry_for is None else retry_for
        give_up_at = self.clock.monotonic() + patience
        attempt = 0
        while True:
            try:
                link = self._link(tag)
                try:
                    return await self._call(link, command)
                except ScriptMissing:
                    await self._load(script, tag)
                    return await self._call(link, command)
            except Moved:
                await self._refresh()
                reason: BrokerError = BrokerUnavailable(f"the slot of {tag!r} keeps moving")
            except BrokerUnavailable as error:
                await self._refresh()
                reason = error
            pause = pause_before(attempt)
            if self.clock.monotonic() + pause > give_up_at:
                raise reason
            attempt += 1
            await asyncio.sleep(pause)

    def _link(self, tag: bytes) -> Link:
        return self.server.link(tag)

    def _call(self, link: Link, command: tuple[Argument, ...]) -> Awaitable[Any]:
        return link.call(*command)

    def prepare(
        self, script: Script, keys: Sequence[bytes], arguments: Sequence[Argument]
    ) -> tuple[Argument, ...]:
        """The command that runs a script; the clock's offset is every script's first argument."""
        return ("EVALSHA", script.sha, len(keys), *keys, self.clock.offset_ms, *arguments)

    async def command(self, tag: bytes, *command: Argument) -> Any:
        """One plain command on the tag's node; tried once more where a move or a lost idle connection undid it.

        Only for commands that may be done twice.
        """
        try:
            return await self.server.link(tag).call(*command)
        except (Moved, BrokerUnavailable):
            await self._refresh()
        return await self.server.link(tag).call(*command)

    async def read_many(self, requests: Sequence[tuple[bytes, tuple[Argument, ...]]]) -> list[Any]:
        """The replies to plain reads, in order: pairs of tag and command, one pipeline for each connection.

        A reply may be a BrokerError that trying again does not mend (no such key, say). Reads that a move or a lost
        connection undid are made once more, all of them.

        Raises:
            BrokerUnavailable: a node is away.
        """
        replies = await self._read_once(requests)
        trouble = next((reply for reply in replies if isinstance(reply, (Moved, BrokerUnavailable))), None)
        if trouble is None:
            return replies
        await self._refresh()
        replies = await self._read_once(requests)
        for reply in replies:
            if isinstance(reply, (Moved, BrokerUnavailable)):
                raise reply
        return replies

    async def _read_once(self, requests: Sequence[tuple[bytes, tuple[Argument, ...]]]) -> list[Any]:
        by_link: dict[Link, list[int]] = {}
        for place, (tag, _) in enumerate(requests):
            by_link.setdefault(self.server.link(tag), []).append(place)
        replies: list[Any] = [None] * len(requests)

        async def read(link: Link, places: list[int]) -> None:
            try:
                answers = await link.call_many([requests[place][1] for place in places])
            except BrokerError as error:
                answers = [error] * len(places)
            for place, answer in zip(places, answers, strict=True):
                replies[place] = answer

        await asyncio.gather(*(read(link, places) for link, places in by_link.items()))
        return replies

    async def load(self, tag: bytes, scripts: Sequence[Script]) -> None:
        """Make the scripts known to the tag's node."""
        for script in scripts:
            await self._load(script, tag)

    async def _load(self, script: Script, tag: bytes) -> None:
        await self.server.link(tag).call("SCRIPT", "LOAD", script.source)

    async def _refresh(self) -> None:
        try:
            await self.server.refresh()
        except BrokerError:
            pass  # the next call tells what is wrong

"""Whether anything is left of a message: its record, or the message itself wherever it may wait.

A record that has expired leaves no trace, and neither the client that submitted a message nor one that was given
its id knows where a message is by now: a retry, a pause or a return from the dead letters puts it somewhere else.
So it is looked for, in one script, where few enough messages wait for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import islice

from taskmesh.broker.scripts import FIND
from taskmesh.broker.streams import Partition
from taskmesh.errors import BrokerError
from taskmesh.settings import MIB

log = logging.getLogger("taskmesh.results")
MAX_MESSAGES = 2000  # a few milliseconds of the server's time
MAX_BYTES = 4 * MIB
AT_ONCE = 200


class Search:
    """Looks for the messages of one partition. Those asked for while a look is under way share the next one."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._asked: dict[str, asyncio.Future[bool]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def is_gone(self, message_id: str) -> bool:
        """Whether the message has ended and its record has expired.

        False as well where that cannot be told: the server is away, or more messages wait than are looked through.
        """
        answer = self._asked.setdefault(message_id, asyncio.get_running_loop().create_future())
        async with self._one_at_a_time:
            if not answer.done():
                others = (each for each in self._asked if each != message_id)
                await self._look([message_id, *islice(others, AT_ONCE - 1)])
            return answer.result()

    async def _look(self, message_ids: Sequence[str]) -> None:
        gone = await self._find(message_ids)
        for message_id in message_ids:
            self._asked.pop(message_id).set_result(message_id in gone)

    async def _find(self, message_ids: Sequence[str]) -> set[str]:
        keys = self._partition.keys
        results = [keys.result(message_id) for message_id in message_ids]
        try:
            numbers = await self._partition.caller.run(
                FIND,
                keys.tag,
                [*keys.lanes, keys.delayed, keys.parked, *results],
                (MAX_MESSAGES, MAX_BYTES),
                retry_for=0.0,
            )
        except BrokerError as error:
            log.debug("looking for messages: %s", error)
            return set()
        return {message_ids[number - 1] for number in numbers if number > 0}

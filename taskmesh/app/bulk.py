"""Bulk submission: messages that go out together, spread over the partitions, their handles in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

from taskmesh.app.client import Client
from taskmesh.errors import NotConfirmed
from taskmesh.keys import partition_of
from taskmesh.results.handle import Handles
from taskmesh.tasks import TaskOptions

RUN = 20  # messages in a row that go into one partition


def new_ids(client: Client, queue: str) -> Callable[[], str]:
    """What makes the ids of a bulk submission: each names the partition that its message goes into."""
    if client.options(queue).partitions == 1:
        return client.new_id
    return _spread_ids(client, queue).__next__


def _spread_ids(client: Client, queue: str) -> Iterator[str]:
    while True:
        for number in repeat(client.next_partition(queue), RUN):
            yield client.new_id(number)


async def send(
    client: Client,
    options: TaskOptions,
    handles: Handles[Any],
    ids: Sequence[str],
    messages: Sequence[bytes],
    blobs: Sequence[bytes] = (),
) -> None:
    """Submit messages and add their handles; ``blobs`` belong to a single one.

    Raises:
        as ``Task.submit``; what other partitions took is submitted all the same.
    """
    groups = _by_partition(ids)
    sent = await asyncio.gather(
        *(
            client.publisher(options.queue, number, options.durability).submit(
                messages if len(groups) == 1 else [messages[place] for place in places], None, blobs
            )
            for number, places in groups.items()
        ),
        return_exceptions=True,
    )
    found: list[str | None] = [None] * len(ids)  # where each was put
    doubt: NotConfirmed | None = None
    for places, answer in zip(groups.values(), sent, strict=True):
        if isinstance(answer, NotConfirmed):
            doubt, answer = answer, answer.places
        if isinstance(answer, BaseException):
            raise answer
        if len(groups) == 1:
            found = answer
            break
        for place, entry in zip(places, answer, strict=True):
            found[place] = entry
    handles.extend(ids, found, len(blobs))
    if doubt is not None:
        doubt.submitted = handles
        raise doubt


def _by_partition(ids: Sequence[str]) -> dict[int, Sequence[int]]:
    """The places of the ids of each partition."""
    if ids[0][12:14] == ids[-1][12:14] and len({message_id[12:14] for message_id in ids}) == 1:
        return {partition_of(ids[0]): range(len(ids))}
    groups: dict[int, list[int]] = {}
    for place, message_id in enumerate(ids):
        groups.setdefault(partition_of(message_id), []).append(place)
    return dict(groups)

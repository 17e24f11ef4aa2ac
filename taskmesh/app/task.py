"""A task as its callers see it: callable, and submittable."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

from taskmesh.app.bulk import new_ids, send
from taskmesh.app.client import Client
from taskmesh.broker import blobs
from taskmesh.codec import encode_call, pack_value
from taskmesh.errors import ConfigurationError, InvalidArguments, NotConfirmed, PayloadTooLarge
from taskmesh.keys import check_id, partition_of
from taskmesh.messages import Priority
from taskmesh.results.collector import Collector
from taskmesh.results.handle import Handle, Handles, Route
from taskmesh.settings import Durability
from taskmesh.tasks import Context, TaskDefinition, TaskOptions

P = ParamSpec("P")
R = TypeVar("R")
BULK = 1000


class Changes(TypedDict, total=False):
    """What ``Task.options`` may change for single submissions; see ``TaskOptions``."""

    priority: Priority
    expires: float | None
    result_ttl: float | None
    durability: Durability | None


class BoundCall(NamedTuple):
    """Arguments for one member of ``submit_many`` or ``map``; made by ``Task.bind``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        """Without the arguments, which may be sensitive."""
        return f"<BoundCall of {len(self.args) + len(self.kwargs)} arguments>"


class Connection(Protocol):
    """Where a task finds the Mesh's client."""

    @property
    def client(self) -> Client: ...


class Task(Generic[P, R]):
    """A registered task.

    ``await task(...)`` runs the handler right here; ``await task.submit(...)`` sends it to a worker.
    """

    def __init__(
        self, definition: TaskDefinition, connection: Connection, options: TaskOptions | None = None
    ) -> None:
        self.definition = definition
        self._connection = connection
        self._options = options or definition.options

    def __repr__(self) -> str:
        return repr(self.definition)

    @property
    def name(self) -> str:
        return self.definition.name

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the handler in this process, outside any worker."""
        function, signature = self.definition.function, self.definition.signature
        if self.definition.options.batch is not None:
            args = ([*args, *kwargs.values()],)  # type: ignore[assignment]
            kwargs = {}  # type: ignore[assignment]
        context = Context("local", self.name, self._options.queue, 1, 1, "local")
        placed, named = signature.place(args, kwargs, context)
        if self.definition.is_async:
            value = await function(*placed, **named)
        else:
            value = await asyncio.to_thread(function, *placed, **named)
        if self.definition.options.batch is not None:
            value = value[0]
            if isinstance(value, Exception):
                raise value
        return value  # type: ignore[no-any-return]

    def options(self, **changes: Unpack[Changes]) -> Task[P, R]:
        """The same task, submitted with other options.

        Raises:
            ConfigurationError: there is no such option, or its value cannot work.
        """
        for option in changes:
            if option not in Changes.__annotations__:
                changeable = ", ".join(Changes.__annotations__)
                raise ConfigurationError(
                    f"{option!r} cannot be changed for a submission; these can: {changeable}"
                )
        return Task(self.definition, self._connection, dataclasses.replace(self._options, **changes))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundCall:
        """Arguments for ``submit_many`` and ``map``, where a task takes more than one."""
        return BoundCall(args, kwargs)

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Send one call to a worker; returned when the server has it.

        Raises:
            InvalidArguments: they do not fit the handler, or cannot travel.
            PayloadTooLarge: they are over the limit.
            QueueFull: the queue's bound is reached.
            BrokerFull: the server has no memory left; nothing was submitted.
            BrokerUnavailable: the server stayed away; whether it was submitted is not known.
            NotConfirmed: it is submitted, with its handle in ``submitted``, but not as durable as was asked for.
        """
        return await self._submit(args, kwargs, None)

    async def submit_in(self, delay: float, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """The same, to be started in ``delay`` seconds of Redis time. It waits in Redis, in no worker's hands."""
        if delay < 0:
            raise InvalidArguments(f"delay is {delay} s; it cannot be negative")
        return await self._submit(args, kwargs, f"+{int(delay * 1000)}")

    async def submit_at(self, when: datetime.datetime, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """The same, to be started at a time of day (with its time zone), by Redis's clock."""
        if when.tzinfo is None:
            raise InvalidArguments(
                f"{when} has no time zone: write datetime(..., tzinfo=...) or .astimezone()"
            )
        return await self._submit(args, kwargs, str(int(when.timestamp() * 1000)))

    async def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], due: str | None) -> Handle[R]:
        client = self._connection.client
        options = self._options
        number = client.next_partition(options.queue)
        message_id = client.new_id(number)
        route = self._route(message_id)
        data = self._encode(client, message_id, args, kwargs, self._extras(client, due))
        chunk_keys: Sequence[bytes] = ()
        if len(data) > client.settings.inline_limit_bytes:
            data, chunk_keys = await self._move_out(client, message_id, args, kwargs, due)
        if route.inbox is not None:
            await route.inbox.open()
        publisher = client.publisher(options.queue, number, options.durability)
        doubt: NotConfirmed | None = None
        try:
            places = await publisher.submit([data], due, chunk_keys)
        except NotConfirmed as error:
            doubt, places = error, error.places
        handle: Handle[R] = Handle(
            message_id,
            self.definition,
            *route,
            self._ttl(client),
            options.priority,
            places[0],
            len(chunk_keys),
        )
        if doubt is not None:
            doubt.submitted = handle
            raise doubt
        return handle

    async def submit_many(self, items: Iterable[Any]) -> Handles[R]:
        """Submit one call for each item: the item is the handler's only argument, or a ``bind`` of several.

        Items go out a thousand at a time, in order; the next thousand is encoded while one is under way.

        Raises:
            as ``submit``; the items before the fault are submitted, those after it are not.
        """
        client = self._connection.client
        options = self._options
        ttl = self._ttl(client)
        if ttl:
            numbers = range(client.options(options.queue).partitions)
            await asyncio.gather(*(client.inbox(options.queue, number).open() for number in numbers))
        handles: Handles[R] = Handles(self.definition, self._route, ttl, options.priority)
        extras = self._extras(client, None)
        limit = client.settings.inline_limit_bytes
        new_id = new_ids(client, options.queue)
        ids: list[str] = []
        messages: list[bytes] = []
        sending: asyncio.Task[None] | None = None
        try:
            for item in items:
                args, kwargs = item if isinstance(item, BoundCall) else ((item,), {})
                message_id = new_id()
                data = self._encode(client, message_id, args, kwargs, extras)
                large = len(data) > limit
                if large or len(messages) == BULK:
                    if sending is not None:
                        await sending
                    going = send(client, options, handles, ids, messages) if messages else None
                    sending = None if going is None else asyncio.create_task(going)
                    ids, messages = [], []
                    await asyncio.sleep(0)
                if large:  # alone, in its turn
                    data, blobs = await self._move_out(client, message_id, args, kwargs, None)
                    if sending is not None:
                        await sending
                    alone = send(client, options, handles, [message_id], [data], blobs)
                    sending = asyncio.create_task(alone)
                else:
                    ids.append(message_id)
                    messages.append(data)
        finally:
            if sending is not None:
                await sending
            if messages:
                await send(client, options, handles, ids, messages)
        return handles

    async def map(self, items: Iterable[Any], *, window: int = 1000) -> AsyncIterator[Handle[R]]:
        """Submit one call for each item and yield the handles as their tasks end.

        At most ``window`` tasks are under way at once, so that a long iterable is taken up as results come.
        """
        collector: Collector[R] = Collector()
        iterator = iter(items)
        try:
            exhausted = False
            while not exhausted or collector.open:
                room = window - collector.open
                if not exhausted and room >= min(window, 100):
                    chunk = list(islice(iterator, room))
                    exhausted = len(chunk) < room
                    for handle in await self.submit_many(chunk):
                        collector.add(handle)
                    if not collector.open:
                        break
                yield await collector.next()
        finally:
            collector.close()

    def handle(self, task_id: str) -> Handle[R]:
        """A handle for a task that was submitted elsewhere.

        Raises:
            ConfigurationError: that is no task's id.
        """
        check_id(task_id)
        client, options = self._connection.client, self._options
        route = self._route(task_id)
        return Handle(task_id, self.definition, *route, self._ttl(client), options.priority, own=False)

    def _route(self, message_id: str) -> Route:
        client, queue = self._connection.client, self._options.queue
        number = partition_of(message_id)
        inbox = client.inbox(queue, number) if self._ttl(client) else None
        return Route(client.partition(queue, number), inbox)

    def _ttl(self, client: Client) -> float:
        ttl = self._options.result_ttl
        return client.settings.result_ttl if ttl is None else ttl

    def _extras(self, client: Client, due: str | None) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        ttl = self._options.result_ttl
        if ttl is not None and ttl != self.definition.options.result_ttl:
            extras["result_ttl_ms"] = int(ttl * 1000)
        expires = self._options.expires
        if expires is None:
            return extras
        start = int(due) if due is not None and due[0] != "+" else client.now_ms() + int((due or "+0")[1:])
        extras["expires_at_ms"] = start + int(expires * 1000)
        return extras

    def _encode(
        self,
        client: Client,
        message_id: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        extras: dict[str, Any],
    ) -> bytes:
        """Check a call and encode its message."""
        definition = self.definition
        definition.signature.check(args, kwargs)
        try:
            data = encode_call(message_id, self._options.priority, definition.name, args, kwargs, extras)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArguments(f"task {definition.name!r}: an argument cannot travel: {error}") from None
        if client.signer is not None:
            data = client.signer.sign(data)
        limit = client.settings.max_payload_bytes
        if len(data) > limit:
            raise PayloadTooLarge(
                f"task {definition.name!r}: the arguments have {len(data):,} bytes; the limit is {limit:,} "
                "(MeshSettings.max_payload_bytes)"
            )
        return data

    async def _move_out(
        self, client: Client, message_id: str, args: tuple[Any, ...], kwargs: dict[str, Any], due: str | None
    ) -> tuple[bytes, Sequence[bytes]]:
        """Upload large arguments beside the message; the message then carries the count of chunks."""
        partition = self._route(message_id).partition
        content = pack_value((args, kwargs))
        chunks = await blobs.upload(partition, message_id, "args", content)
        extras = {**self._extras(client, due), "blob_chunks": chunks}
        if client.signer is not None and client.signer.signs:
            extras["blob_digest"] = client.signer.digest(content)
        data = encode_call(message_id, self._options.priority, self.name, (), {}, extras)
        if client.signer is not None:
            data = client.signer.sign(data)
        return data, blobs.chunk_keys(partition, message_id, "args", chunks)


Handler = Callable[P, Any]

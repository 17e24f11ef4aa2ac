"""``taskmesh dead``: messages that could not end well."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
import typer

from taskmesh.app.mesh import Mesh
from taskmesh.broker.deadletter import dead_letter
from taskmesh.cli.console import table
from taskmesh.cli.loading import load_mesh
from taskmesh.cli.state import App, Json
from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.messages import DeadLetter
from taskmesh.tasks import REDACTED
from taskmesh.worker.redact import redacted, redactor_of

PAGE = 500
MAX_ERROR_CHARACTERS = 60
MAX_ARGUMENT_CHARACTERS = 500
commands = typer.Typer(
    help="List, show, requeue or discard dead letters.", no_args_is_help=True, rich_markup_mode=None
)

Queue = Annotated[
    str | None, typer.Option("--queue", "-q", help="Only this queue's. Default: every queue's.")
]
Entries = Annotated[
    list[str] | None, typer.Argument(metavar="[ENTRY]...", help="Ids as `dead list` shows them.")
]
All = Annotated[bool, typer.Option("--all", help="Every dead letter, instead of some by id.")]


@commands.command("list", short_help="Show dead and parked messages.")
def list_letters(
    app: App,
    queue: Queue = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="The oldest so many of each queue.")
    ] = 100,
    as_json: Json = False,
) -> None:
    """Show dead and parked messages, oldest first, with the reason of each."""
    mesh = load_mesh(app)

    async def read() -> list[DeadLetter]:
        async with mesh:
            return [
                letter for name in _queues(mesh, queue) for letter in await mesh.dead_letters(name, limit)
            ]

    letters = [_without_secrets(mesh, letter) for letter in asyncio.run(read())]
    if as_json:
        typer.echo(msgspec.json.encode([_as_record(letter) for letter in letters]).decode())
        return
    rows = [
        (
            letter.entry,
            letter.queue,
            letter.message.task if letter.message else "?",
            letter.deliveries,
            letter.reason,
            _short(f"{letter.failure.type}: {letter.failure.message}" if letter.failure else "-"),
        )
        for letter in letters
    ]
    typer.echo(table(("ENTRY", "QUEUE", "TASK", "DELIVERIES", "REASON", "ERROR"), rows))


@commands.command(short_help="Show one dead letter: its arguments and its traceback.")
def show(
    app: App,
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="Its id as `dead list` shows it.")],
    queue: Queue = None,
    as_json: Json = False,
) -> None:
    """Show one dead letter whole: its arguments, but for the sensitive ones, and its traceback."""
    mesh = load_mesh(app)

    async def read() -> DeadLetter:
        async with mesh:
            return await _find(mesh, _queues(mesh, queue), entry)

    letter = _without_secrets(mesh, asyncio.run(read()))
    arguments = _arguments(mesh, letter)
    record = _as_record(letter)
    failure = letter.failure
    if as_json:
        typer.echo(
            msgspec.json.encode(
                {**record, "arguments": arguments, "traceback": failure.traceback if failure else None}
            ).decode()
        )
        return
    record["error"] = f"{failure.type}: {failure.message}" if failure else "-"
    record["at_ms"] = f"{letter.at_ms} ({_time_of(letter.at_ms)})"
    lines = [f"{name:<12}{'-' if value is None else value}" for name, value in record.items()]
    shown = [arguments] if isinstance(arguments, str) else [f"{k} = {v}" for k, v in arguments.items()]
    lines += ["arguments", *(f"  {line}" for line in shown)]
    if failure is not None and failure.traceback:
        lines += ["traceback", *(f"  {line}" for line in failure.traceback.splitlines())]
    typer.echo("\n".join(lines))


@commands.command()
def requeue(app: App, entries: Entries = None, queue: Queue = None, every: All = False) -> None:
    """Put dead letters back into their queue, as a first attempt."""
    mesh = load_mesh(app)
    done, left = asyncio.run(_each(mesh, entries, queue, every, mesh.requeue))
    kept = f"; {left} cannot be decoded and stay" if left else ""
    typer.echo(f"requeued {done}{kept}")


@commands.command()
def discard(app: App, entries: Entries = None, queue: Queue = None, every: All = False) -> None:
    """Throw dead letters away for good."""
    mesh = load_mesh(app)
    done, _ = asyncio.run(_each(mesh, entries, queue, every, mesh.discard))
    typer.echo(f"discarded {done}")


async def _each(
    mesh: Mesh,
    entries: list[str] | None,
    queue: str | None,
    every: bool,
    act: Callable[[DeadLetter], Awaitable[bool]],
) -> tuple[int, int]:
    """Do it to the letters that are meant; returns how many it was done to, and how many it could not be."""
    if bool(entries) == every:
        raise ConfigurationError("name the dead letters by entry id, or say --all")
    async with mesh:
        names = _queues(mesh, queue)
        if entries:
            letters = [await _find(mesh, names, entry) for entry in entries]
            return sum([await act(letter) for letter in letters]), 0
        done = left = 0
        for name in names:
            skipped = 0
            while letters := (await mesh.dead_letters(name, PAGE + skipped))[skipped:]:
                for letter in letters:
                    try:
                        done += await act(letter)
                    except DecodeError:
                        skipped += 1
            left += skipped
        return done, left


def _queues(mesh: Mesh, queue: str | None) -> list[str]:
    return [queue] if queue else mesh.registry.queues


async def _find(mesh: Mesh, queues: list[str], entry: str) -> DeadLetter:
    found = [
        letter
        for name in queues
        for partition in mesh.client.partitions(name)
        if (letter := await dead_letter(partition, entry)) is not None
    ]
    if not found:
        raise ConfigurationError(f"there is no dead letter {entry!r} in {', '.join(queues)}")
    if len(found) > 1:
        names = " and ".join(letter.queue for letter in found)
        raise ConfigurationError(f"{entry!r} is in {names}: say which with --queue")
    return found[0]


def _without_secrets(mesh: Mesh, letter: DeadLetter) -> DeadLetter:
    """The letter without sensitive arguments in its failure: it may be older than the word that they are."""
    message, failure = letter.message, letter.failure
    if message is None or failure is None or (definition := mesh.registry.get(message.task)) is None:
        return letter
    redact = redactor_of(definition, message, letter.raw)
    return letter if redact is None else msgspec.structs.replace(letter, failure=redacted(failure, redact))


def _arguments(mesh: Mesh, letter: DeadLetter) -> dict[str, str] | str:
    """The arguments by parameter, as text; or why they are not shown."""
    message = letter.message
    if message is None:
        return f"(not shown: {len(letter.raw):,} bytes that cannot be read)"
    if message.blob_chunks:
        return f"(not shown: they are large, and lie in {message.blob_chunks} pieces beside the message)"
    definition = mesh.registry.get(message.task)
    if definition is None:
        return f"(not shown: this Mesh has no task {message.task!r}, and cannot tell which are sensitive)"
    named = definition.shown(message.args, message.kwargs)
    if named is None:
        return "(not shown: they do not fit the task's parameters)"
    return {name: REDACTED if value is REDACTED else _cut(repr(value)) for name, value in named.items()}


def _time_of(ms: int) -> str:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC).isoformat(timespec="seconds")


def _cut(text: str) -> str:
    if len(text) <= MAX_ARGUMENT_CHARACTERS:
        return text
    return f"{text[:MAX_ARGUMENT_CHARACTERS]}... ({len(text):,} characters)"


def _as_record(letter: DeadLetter) -> dict[str, object]:
    """Without the arguments and the traceback: they may hold what does not belong in a log."""
    message, failure = letter.message, letter.failure
    return {
        "entry": letter.entry,
        "queue": letter.queue,
        "reason": letter.reason,
        "id": message.id if message else None,
        "task": message.task if message else None,
        "attempt": message.attempt if message else None,
        "deliveries": letter.deliveries,
        "worker": letter.worker,
        "error": {"type": failure.type, "message": failure.message} if failure else None,
        "at_ms": letter.at_ms,
    }


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[: MAX_ERROR_CHARACTERS - 3]}..."

"""``taskmesh runs``: the training runs of a Mesh, and what made them what they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from taskmesh.checkpoints.lease import Lease
from taskmesh.cli.console import duration, table
from taskmesh.cli.loading import load
from taskmesh.cli.state import Json
from taskmesh.cli.training_run import App, Run, TrainingRun, do, do_all
from taskmesh.errors import ConfigurationError

commands = typer.Typer(
    help="List, replay, search the training runs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@commands.command("list", short_help="How each run stands.")
def list_runs(app: App, run: Run = None, as_json: Json = False) -> None:
    """How each run of a Mesh stands: its last version, who leads it, what it keeps."""
    records = do_all(app, run, _look)
    if as_json:
        typer.echo(msgspec.json.encode(records).decode())
        return
    rows = [
        (
            record["run"],
            _or_dash(record["version"]),
            _or_dash(record["step"]),
            "-" if record["loss"] is None else f"{record['loss']:.4g}",
            duration(record["age"]),
            len(record["checkpoints"]),
            record["leader"] or "nobody",
        )
        for record in records
    ]
    typer.echo(table(("RUN", "VERSION", "STEP", "LOSS", "AGE", "CHECKPOINTS", "LED BY"), rows))


@commands.command(short_help="Who formed each version, and of what.")
def ledger(
    app: App,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="The newest so many versions.")] = 100,
    worker: Annotated[
        str | None, typer.Option("--worker", "-w", help="Only versions that it contributed to.")
    ] = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Who formed the newest versions of a run, and of what; oldest first."""

    async def read(found: TrainingRun) -> list[Any]:
        return list(await found.trainer("the ledger is read by it").ledger(limit))

    entries = [entry for entry in do(app, run, read) if worker is None or _shards(entry, worker)]
    if as_json:
        typer.echo(msgspec.json.encode([_as_record(entry) for entry in entries]).decode())
        return
    rows = [
        (
            entry.version,
            entry.step,
            entry.parent,
            sum(share.samples for share in entry.shares),
            _formed_by(entry),
        )
        for entry in entries
    ]
    typer.echo(table(("VERSION", "STEP", "FROM", "SAMPLES", "FORMED BY"), rows))


@commands.command(short_help="Form versions again; compare the digests.")
def replay(
    app: App,
    first: Annotated[
        int | None,
        typer.Option("--from", help="A checkpoint. Default: the oldest from which it can be told."),
    ] = None,
    last: Annotated[int | None, typer.Option("--to", help="A version. Default: the current one.")] = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Form a run's versions again, from a checkpoint and the ledger, and compare them with what it committed.

    The exit code is 1 when one comes out otherwise.
    """

    async def form(found: TrainingRun) -> list[Any]:
        return list(await found.trainer("a replay needs its model and data").replay(first, last))

    versions = do(app, run, form)
    if as_json:
        typer.echo(msgspec.json.encode([version._asdict() for version in versions]).decode())
    else:
        said = {True: "the same", False: "DIFFERENT", None: "unknown"}
        rows = [(each.version, each.step, each.digest, said[each.matches]) for each in versions]
        typer.echo(table(("VERSION", "STEP", "DIGEST", "THE RUN'S"), rows))
    if any(version.matches is False for version in versions):
        raise typer.Exit(1)


@commands.command(short_help="Find the version that turned bad.")
def bisect(
    app: App,
    metric: Annotated[
        str,
        typer.Option("--metric", "-m", help="A function from a model to a number, as module:function."),
    ],
    at_most: Annotated[
        float | None, typer.Option("--at-most", help="Good versions have at most this.")
    ] = None,
    at_least: Annotated[
        float | None, typer.Option("--at-least", help="Good versions have at least this.")
    ] = None,
    good: Annotated[
        int | None, typer.Option("--good", help="A good checkpoint. Default: the oldest that can be used.")
    ] = None,
    bad: Annotated[int | None, typer.Option("--bad", help="A bad version. Default: the current one.")] = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Find the version at which a metric turned bad, by judging as few models as can be."""
    is_bad = _judge(metric, at_most, at_least, quiet=as_json)

    async def search(found: TrainingRun) -> Any:
        return await found.trainer("a search needs its model and data").bisect(is_bad, good=good, bad=bad)

    found = do(app, run, search)
    entry = found.entry
    if as_json:
        record = {"version": found.version, "step": found.step, "evaluations": found.evaluations}
        typer.echo(msgspec.json.encode({**record, "entry": _as_record(entry)}).decode())
        return
    typer.echo(
        f"version {found.version}, step {found.step}, is the first bad one; it was formed from version {entry.parent} "
        f"and batch {entry.batch} by {_formed_by(entry)}"
    )


@commands.command(short_help="Remove a run, with all its checkpoints.")
def delete(
    app: App,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    mirror: Annotated[bool, typer.Option("--mirror", help="What is on its mirror, too.")] = False,
    run: Run = None,
) -> None:
    """Remove a run while nobody trains: its versions, ledger and keys. The mirror stays unless asked."""

    async def remove(found: TrainingRun) -> str:
        kept = len(await found.store.kept())
        if not yes:
            typer.confirm(f"Delete run {found.name} with its {kept} checkpoints?", abort=True)
        if mirror:
            await found.trainer("it says where the mirror is").delete(mirror=True)
        else:
            lease = Lease(found.mesh.client.caller, found.store.keys, found.mesh.settings.liveness_ttl)
            token = await lease.acquire(timeout=0)
            try:
                await found.store.delete(token)
            finally:
                await lease.release()
        return f"run {found.name} is deleted, with {kept} checkpoints"

    typer.echo(do(app, run, remove))


def _judge(
    metric: str, at_most: float | None, at_least: float | None, *, quiet: bool
) -> Callable[[Any], bool]:
    if (at_most is None) == (at_least is None):
        raise ConfigurationError("say what is good: --at-most or --at-least, one of them")
    measure = load(metric)
    if not callable(measure):
        raise ConfigurationError(f"{metric!r} is no function")

    def is_bad(model: Any) -> bool:
        value = float(measure(model))
        is_good = value <= at_most if at_most is not None else at_least is not None and value >= at_least
        if not quiet:
            typer.echo(f"{metric} {value:.6g}: {'good' if is_good else 'bad'}", err=True)
        return not is_good  # a value that is no number is bad

    return is_bad


async def _look(found: TrainingRun) -> dict[str, Any]:
    store, current = found.store, await found.store.current()
    lease = Lease(found.mesh.client.caller, store.keys, found.mesh.settings.liveness_ttl)
    return {
        "run": found.name,
        "version": None if current is None else current.version,
        "step": None if current is None else current.step,
        "loss": None if current is None else current.metrics.get("loss"),
        "age": None if current is None or not current.at_ms else max(0.0, time.time() - current.at_ms / 1000),
        "skipped": () if current is None else current.skipped,
        "checkpoints": [manifest.version for manifest in await store.kept()],
        "leader": await lease.leader(),
    }


def _or_dash(value: int | None) -> int | str:
    return "-" if value is None else value


def _shards(entry: Any, worker: str) -> list[int]:
    return [share.shard for share in entry.shares if share.worker == worker]


def _formed_by(entry: Any) -> str:
    """A version's workers with their shards: "host-1-a 0-2,5; host-2-b 3,4"."""
    if entry.without:
        return f"formed again without {entry.without} since version {entry.since}"
    if entry.batch < 0:
        return f"version {entry.parent} again"
    workers = sorted({share.worker for share in entry.shares})
    return "; ".join(f"{worker} {_ranges(_shards(entry, worker))}" for worker in workers)


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def _as_record(entry: Any) -> dict[str, Any]:
    lists = {name: [each._asdict() for each in getattr(entry, name)] for name in ("shares", "extra", "owed")}
    return {**msgspec.structs.asdict(entry), **lists, "digest": entry.digest.hex()}

"""``taskmesh checkpoints``: the versions that a training run keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from taskmesh.checkpoints.files import write_folder
from taskmesh.checkpoints.lease import Lease
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.retention import Every
from taskmesh.checkpoints.store import VersionStore
from taskmesh.cli.console import duration, table
from taskmesh.cli.state import Json
from taskmesh.cli.training_run import App, Run, TrainingRun, do
from taskmesh.errors import CheckpointError

commands = typer.Typer(
    help="List, verify, restore, export a run's checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Version = Annotated[
    int, typer.Argument(metavar="VERSION", help="Its number, as `checkpoints list` shows it.")
]
MaybeVersion = Annotated[
    int | None, typer.Argument(metavar="[VERSION]", help="Its number. Default: the newest that is kept.")
]
Versions = Annotated[
    list[int] | None,
    typer.Argument(metavar="[VERSION]...", help="Their numbers. Default: all that are kept."),
]


@commands.command("list", short_help="Show the versions that are kept.")
def list_versions(app: App, run: Run = None, as_json: Json = False) -> None:
    """Show the versions that a run keeps, oldest first."""

    async def read(found: TrainingRun) -> tuple[list[Manifest], Manifest | None]:
        return await found.store.kept(), await found.store.current()

    kept, current = do(app, run, read)
    if as_json:
        typer.echo(msgspec.json.encode([_as_record(manifest, current) for manifest in kept]).decode())
        return
    rows = [
        (
            manifest.version,
            manifest.step,
            duration(_age(manifest)),
            size(manifest.size_bytes),
            size(manifest.size_bytes - manifest.written_bytes),
            _metrics(manifest),
            _note(manifest, current),
        )
        for manifest in kept
    ]
    typer.echo(table(("VERSION", "STEP", "AGE", "SIZE", "SHARED", "METRICS", ""), rows))


@commands.command()
def show(app: App, version: Version, run: Run = None, as_json: Json = False) -> None:
    """Show one version: where it comes from, and its parts."""

    async def read(found: TrainingRun) -> tuple[Manifest, Manifest | None]:
        return await found.store.find_kept(version), await found.store.current()

    manifest, current = do(app, run, read)
    parts = [
        {
            "name": name,
            "size_bytes": part.size_bytes,
            "chunks": len(part.digests),
            "own_chunks": len(part.own) if part.version == manifest.version else 0,
            "digest": part.root.hex(),
        }
        for name, part in manifest.parts.items()
    ]
    record = _as_record(manifest, current)
    if as_json:
        typer.echo(msgspec.json.encode({**record, "parts": parts}).decode())
        return
    record["metrics"] = _metrics(manifest)
    record["skipped"] = ", ".join(map(str, manifest.skipped))
    lines = [f"{name:<16}{'-' if value in (None, '') else value}" for name, value in record.items()]
    rows = [tuple(part.values()) for part in parts]
    typer.echo("\n".join([*lines, "", table(("PART", "BYTES", "CHUNKS", "OWN", "DIGEST"), rows)]))


@commands.command(short_help="Read versions whole, and hold each chunk against its digest.")
def verify(app: App, versions: Versions = None, run: Run = None, as_json: Json = False) -> None:
    """Read versions whole, and hold each chunk against its digest; exit code 1 when something is damaged."""

    async def read(found: TrainingRun) -> list[tuple[Manifest, str | None]]:
        store = found.store
        wanted = [await store.find_kept(version) for version in versions or ()] or await store.kept()
        return [(manifest, await _fault(store, manifest)) for manifest in wanted]

    results = do(app, run, read)
    if as_json:
        records = [
            {"version": manifest.version, "whole": fault is None, "fault": fault}
            for manifest, fault in results
        ]
        typer.echo(msgspec.json.encode(records).decode())
    else:
        rows = [
            (manifest.version, size(manifest.size_bytes), "whole" if fault is None else f"damaged: {fault}")
            for manifest, fault in results
        ]
        typer.echo(table(("VERSION", "SIZE", "STATE"), rows))
    if any(fault is not None for _, fault in results):
        raise typer.Exit(1)


@commands.command()
def rollback(app: App, version: Version, run: Run = None) -> None:
    """Make a version current, as a new version, while nobody trains."""

    async def restore(found: TrainingRun) -> int:
        trainer = found.trainer("a rollback needs its model and optimizer")
        return int(await trainer.rollback(to=version))

    typer.echo(f"version {version} is current again, as version {do(app, run, restore)}")


@commands.command(short_help="Write a version into a folder, as safetensors.")
def export(
    app: App,
    to: Annotated[Path, typer.Option("--to", help="The folder, which must not be there yet.")],
    version: MaybeVersion = None,
    run: Run = None,
) -> None:
    """Write a version into a new folder: model.safetensors, state.safetensors and manifest.json."""

    async def read(found: TrainingRun) -> Manifest:
        store = found.store
        if version is None:
            newest = await store.load_newest()
            if newest is None:
                raise CheckpointError(f"run {found.name!r} has no version yet")
            manifest, parts = newest
        else:
            manifest = await store.find_kept(version)
            parts = {name: await store.load(part) for name, part in manifest.parts.items()}
        await asyncio.to_thread(write_folder, to, store.keys, manifest, parts)
        return manifest

    manifest = do(app, run, read)
    typer.echo(f"version {manifest.version}, step {manifest.step}: {size(manifest.size_bytes)} in {to}")


@commands.command(short_help="Remove versions by rule, while nobody trains.")
def prune(
    app: App,
    keep: Annotated[int, typer.Option("--keep", "-k", min=1, help="The newest so many stay.")],
    milestone_steps: Annotated[
        int | None, typer.Option("--milestone-steps", min=1, help="Multiples of so many steps stay.")
    ] = None,
    best: Annotated[str | None, typer.Option("--best", help="The best by this metric stays.")] = None,
    highest: Annotated[bool, typer.Option("--highest", help="Its highest value is the best.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Remove all versions but those that a rule names, while nobody trains."""
    best_is: Literal["lowest", "highest"] = "highest" if highest else "lowest"
    rule = Every(keep=keep, milestone_steps=milestone_steps, best=best, best_is=best_is)

    async def remove(found: TrainingRun) -> list[Manifest]:
        if dry_run:
            return _leaving(rule, await found.store.kept())
        lease = Lease(found.mesh.client.caller, found.store.keys, found.mesh.settings.liveness_ttl)
        token = await lease.acquire(timeout=0)
        try:
            leaving = _leaving(rule, await found.store.kept())
            await found.store.drop(leaving, token)
        finally:
            await lease.release()
        return leaving

    gone = [manifest.version for manifest in do(app, run, remove)]
    if as_json:
        typer.echo(msgspec.json.encode({"dry_run": dry_run, "versions": gone}).decode())
    else:
        said = "would remove" if dry_run else "removed"
        typer.echo(f"{said} {len(gone)}{': ' if gone else ''}{', '.join(map(str, gone))}")


def _leaving(rule: Every, kept: Sequence[Manifest]) -> list[Manifest]:
    stay = rule.retained(kept)
    return [manifest for manifest in kept if manifest.version not in stay]


async def _fault(store: VersionStore, manifest: Manifest) -> str | None:
    """What is wrong with a version; None where it is whole."""
    for name, part in manifest.parts.items():
        try:
            await store.load(part)
        except CheckpointError as error:
            return f"{name}: {error}"
    return None


def _as_record(manifest: Manifest, current: Manifest | None) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "step": manifest.step,
        "batch": manifest.batch,
        "parent": manifest.parent,
        "restored_from": manifest.restored_from,
        "skipped": manifest.skipped,
        "at_ms": manifest.at_ms or None,
        "metrics": manifest.metrics,
        "size_bytes": manifest.size_bytes,
        "shared_bytes": manifest.size_bytes - manifest.written_bytes,
        "layout": manifest.layout,
        "token": manifest.token,
        "fingerprint": manifest.fingerprint,
        "is_current": _is_current(manifest, current),
    }


def _age(manifest: Manifest) -> float | None:
    return max(0.0, time.time() - manifest.at_ms / 1000) if manifest.at_ms else None


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())


def _note(manifest: Manifest, current: Manifest | None) -> str:
    notes = ["current"] if _is_current(manifest, current) else []
    if manifest.restored_from is not None:
        notes.append(f"version {manifest.restored_from} again")
    return ", ".join(notes)


def _is_current(manifest: Manifest, current: Manifest | None) -> bool:
    return current is not None and current.version == manifest.version


def size(count: int) -> str:
    """Bytes in short: "812 B", "39.1 kB", "120.0 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"

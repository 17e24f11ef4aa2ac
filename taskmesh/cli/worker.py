"""``taskmesh worker``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from taskmesh.cli import console, worker_process
from taskmesh.cli.console import LOG_LEVELS
from taskmesh.cli.state import App, state
from taskmesh.cli.supervisor import Supervisor
from taskmesh.errors import ConfigurationError

DEFAULTS = worker_process.Plan(app="")


def worker(
    app: App,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", "-q", help="A queue to serve; may be repeated. Default: all."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="Handlers that run at once, in each process.")
    ] = DEFAULTS.concurrency,
    procs: Annotated[
        int, typer.Option("--procs", min=1, help="Worker processes; one that dies is replaced.")
    ] = 1,
    handler_procs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes for tasks with process=True, in each worker process. Default: one a CPU.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        bool,
        typer.Option(
            "--group", help="Be one worker with the other ranks that torchrun starts (training runs only)."
        ),
    ] = False,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", min=0, help="Seconds that running handlers get to finish.")
    ] = DEFAULTS.drain_timeout,
    log_level: Annotated[
        str, typer.Option("--log-level", help=f"One of {', '.join(LOG_LEVELS)}.")
    ] = DEFAULTS.log_level,
) -> None:
    """Serve the queues of a Mesh until SIGTERM or SIGINT, then drain. A second signal ends it at once."""
    if log_level.lower() not in LOG_LEVELS:
        raise ConfigurationError(f"log level {log_level!r}: it is one of {', '.join(LOG_LEVELS)}")
    if group and procs > 1:
        raise ConfigurationError(
            "--group and --procs do not go together: torchrun starts the processes of a group"
        )
    plan = worker_process.Plan(
        app=app,
        queues=tuple(queue or ()),
        concurrency=concurrency,
        handler_procs=handler_procs,
        drain_timeout=drain_timeout,
        log_level=log_level.lower(),
        debug=state.debug,
        group=group,
    )
    if procs == 1:
        command = worker_process.command(plan)
        os.execv(command[0], command)  # the same process, rid of typer and what it brings: 9 MB
    console.start_log(plan.log_level)
    raise typer.Exit(Supervisor(plan, procs).run())

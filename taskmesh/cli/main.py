"""The entry of the ``taskmesh`` command: its commands, and one clear line for whatever goes wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from taskmesh.cli import checkpoints, dead, inspect, runs
from taskmesh.cli.console import report
from taskmesh.cli.state import Json, state
from taskmesh.cli.worker import worker
from taskmesh.errors import ConfigurationError

EXTRAS = ("torch", "numpy", "sklearn")  # what the extra "demo" brings

# Without rich: it would cost every worker 10 MB, and its boxes do not survive a pipe.
app = typer.Typer(
    name="taskmesh",
    help="Async tasks, training and scoring over one Redis.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("taskmesh"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Async tasks, training and scoring over one Redis."""
    state.debug = debug


@app.command(short_help="The whole story on this machine.")
def demo(as_json: Json = False) -> None:
    """Train, crash, recover, roll back, evaluate and score on this machine."""
    try:
        run_demo = importlib.import_module("taskmesh.demo.main").run_demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        raise ConfigurationError(f"`taskmesh demo` needs {missing}: pip install 'taskmesh[demo]'") from error
    raise typer.Exit(run_demo(json=as_json))


app.command(short_help="Serve the queues of a Mesh.")(worker)
app.command(short_help="What waits and runs in each queue.")(inspect.queues)
app.command(short_help="The workers, and how much each holds.")(inspect.workers)
app.command()(inspect.top)
app.add_typer(dead.commands, name="dead")
app.add_typer(checkpoints.commands, name="checkpoints")
app.add_typer(runs.commands, name="runs")


def main() -> None:
    """Run the command line. Errors of taskmesh are one line on stderr and exit code 1."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        report(error, debug=state.debug)
        sys.exit(1)


if __name__ == "__main__":
    main()

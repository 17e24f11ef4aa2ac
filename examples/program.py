"""What the examples' programs have in common: options, Ctrl-C, and errors in one line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from taskmesh import TaskmeshError

INTERRUPTED = 130


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every example has."""
    made = argparse.ArgumentParser(f"python -m examples.{name}", description=description)
    made.add_argument(
        "--steps", type=_positive, help="go on to so many steps in all, not the example's own number"
    )
    made.add_argument(
        "--no-worker",
        dest="worker",
        action="store_false",
        help=f"only lead: workers are elsewhere (taskmesh worker examples.{name}:mesh)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        help="folder of the loss curve and its picture (default: %(default)s)",
    )
    return made


def program(
    main: Callable[[argparse.Namespace], Coroutine[Any, Any, None]], arguments: argparse.ArgumentParser
) -> None:
    """Run an example to its end, to Ctrl-C (exit code 130) or to an error (exit code 1)."""
    options = arguments.parse_args()
    try:
        asyncio.run(main(options))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except TaskmeshError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number

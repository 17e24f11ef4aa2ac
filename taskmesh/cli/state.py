"""What the commands share: the --debug flag, and how an app is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

App = Annotated[
    str, typer.Argument(metavar="APP", help="The Mesh, as module:attribute (for example app:mesh).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(slots=True)
class State:
    """Set by the options before the command's name."""

    debug: bool = False


state = State()

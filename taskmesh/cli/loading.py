"""From ``module:attribute`` to the object, with errors that say what is wrong and where."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from taskmesh.app.mesh import Mesh
from taskmesh.errors import ConfigurationError, TaskmeshError


def load(target: str) -> Any:
    """The object that ``module:attribute`` names; the working directory is looked in first.

    Raises:
        ConfigurationError: it is not written so, there is none, or importing it fails.
    """
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise ConfigurationError(f"{target!r} names no object: write module:attribute, for example app:mesh")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _import(name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigurationError(f"module {name!r} has no attribute {attribute!r}") from None
    return found


def load_mesh(target: str) -> Mesh:
    """The Mesh that ``module:attribute`` names.

    Raises:
        ConfigurationError: as ``load``, and when it is something else.
    """
    found = load(target)
    if isinstance(found, Mesh):
        return found
    hint = ""
    if isinstance(getattr(found, "mesh", None), Mesh):
        hint = f"; its Mesh is {target}.mesh"
    raise ConfigurationError(f"{target!r} is not a Mesh but {_describe(found)}{hint}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == name or name.startswith(f"{missing}."):
            raise ConfigurationError(
                f"there is no module {missing!r} in {Path.cwd()} or on the Python path"
            ) from error
        raise ConfigurationError(f"importing {name!r} failed: it needs the module {missing!r}") from error
    except TaskmeshError as error:
        raise type(error)(f"importing {name!r} failed: {error}") from error
    except Exception as error:
        raise ConfigurationError(
            f"importing {name!r} failed: {type(error).__name__}: {error}{_place(error)}"
        ) from error


def _place(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its text has the place
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _describe(found: object) -> str:
    kind = type(found).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    return f"{article} {kind}"

"""The peers' virtual environments: made when first needed, kept under `.envs/`, one for each peer.

One each, because their pins exclude one another (arq and saq want an older redis client than taskiq-redis),
and because a peer that cannot be installed must not take the others with it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

# "~=" keeps the figures repeatable and still takes bug fixes.
CLIENT = ("redis~=8.1.0", "hiredis~=3.5.0", "uvloop~=0.23.0")
OLD_CLIENT = ("redis~=5.3.1", "hiredis~=3.5.0", "uvloop~=0.23.0")  # arq pins redis<6, saq[redis] redis<8
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "taskiq": ("taskiq~=0.13.0", "taskiq-redis~=1.2.4", *CLIENT),
    "faststream": ("faststream[redis]~=0.7.8", *CLIENT),
    "streaq": ("streaq~=7.2.0", "uvloop~=0.23.0"),  # brings its own client, coredis
    "arq": ("arq~=0.28.0", *OLD_CLIENT),
    "saq": (
        "saq[redis,hiredis]~=0.26.4",
        "typing-extensions~=4.16",
        *OLD_CLIENT,
    ),  # which saq imports, undeclared
    "huey": ("huey~=3.5.4", "gevent~=26.9.0", *CLIENT),
    "dramatiq": ("dramatiq[redis]~=2.2.1", *CLIENT),
    "docket": ("pydocket~=0.27.0", *CLIENT),
    "celery": ("celery[redis]~=5.7.0", *CLIENT),
}
INSTALL_TIMEOUT = 600.0


class InstallFailed(Exception):
    """A peer's environment could not be made; the message says why in a line."""


def environments_folder() -> Path:
    """Where the environments are kept: TASKMESH_BENCH_ENVS, or `.envs` beside this file."""
    chosen = os.environ.get("TASKMESH_BENCH_ENVS")
    return Path(chosen) if chosen else Path(__file__).parent / ".envs"


def environment_path(peer: str) -> Path:
    """The folder of a peer's environment, named by what is in it."""
    contents = "\n".join((*REQUIREMENTS[peer], platform.python_implementation(), platform.python_version()))
    return environments_folder() / f"{peer}-{hashlib.sha256(contents.encode()).hexdigest()[:12]}"


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, made now if it is not there.

    A half-made environment is never taken for a whole one: the marker is written last. Raises InstallFailed.
    """
    folder = environment_path(peer)
    python = folder / "bin" / "python"
    marker = folder / "complete"
    if marker.exists() and python.exists():
        return python
    print(f"making the environment of {peer} ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        install += REQUIREMENTS[peer]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise InstallFailed(f"pip did not end within {INSTALL_TIMEOUT:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr or error.stdout or "").splitlines() if line.strip()]
        raise InstallFailed(lines[-1] if lines else f"exit status {error.returncode}") from None
    except OSError as error:
        raise InstallFailed(str(error)) from None
    marker.write_text("\n".join(REQUIREMENTS[peer]) + "\n")
    return python


def versions_of(peer: str) -> dict[str, str]:
    """The versions that the peer's environment holds, of the packages that were asked for."""
    names = [requirement.split("~=")[0].split("[")[0] for requirement in REQUIREMENTS[peer]]
    program = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    answer = subprocess.run(
        [str(python_of(peer)), "-c", program, *names], check=True, capture_output=True, text=True, timeout=60
    )
    return dict(zip(names, answer.stdout.split(), strict=True))

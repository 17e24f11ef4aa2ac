"""Programs of different versions side by side, as in a rolling deploy: what a worker tells the others that it can run,
and how long a message waits whose arguments no worker takes.

A producer checks arguments against its own handlers, so arguments that do not fit in a worker mean that the two run
different versions. The message is not at fault: it goes to a worker whose handler has another signature, or waits for
one, and fails only when ``WorkerSettings.misfit_patience`` has run out.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskmesh.tasks import Registry, TaskDefinition

FIRST_PAUSE = 0.2
DOUBLINGS = 7
LONGEST_PAUSE = 15.0


def abilities(registry: Registry, wire_versions: Sequence[int]) -> list[str]:
    """What a worker puts on the list of who knows what: tasks, in which version, and wire versions that it reads."""
    tasks = list(registry)
    return [
        *(task.name for task in tasks),
        *(own_version(task) for task in tasks),
        *(wire_ability(version) for version in wire_versions),
    ]


def own_version(task: TaskDefinition) -> str:
    """A task as this program has it; no task's name has an "@"."""
    return f"{task.name}@{task.signature.fingerprint:08x}"


def wire_ability(version: int) -> str:
    """The reading of a wire version; no task's name has a ":"."""
    return f"wire:{version}"


def misfit_pause(misfits: int, patience: float) -> float | None:
    """Seconds until a message is tried again whose arguments did not fit, ``misfits`` times before; None: no more.

    0.2 s at first, doubled up to 15 s, until ``patience`` seconds are over.
    """
    doublings = min(misfits, DOUBLINGS)
    waited = FIRST_PAUSE * (2.0**doublings - 1) + LONGEST_PAUSE * (misfits - doublings)
    if waited >= patience:
        return None
    pause = FIRST_PAUSE * 2.0**misfits if misfits < DOUBLINGS else LONGEST_PAUSE
    return min(pause, patience - waited)

"""The master of the run that TASKMESH_APP names, or its hot standby: whoever holds the lease leads.

    TASKMESH_APP=examples.digits:trainer TASKMESH_STEPS=1000 TASKMESH_URL=redis://... python -m workers.master

Start it twice. The second one waits, and goes on from the last commit when the first is gone.
"""

from __future__ import annotations

from workers.program import load, run, whole_number


async def main() -> None:
    trainer = load()
    async with trainer.mesh:
        await trainer.run(steps=whole_number("TASKMESH_STEPS", 1000))


if __name__ == "__main__":
    run(main)

"""A gradient worker: computes shards of the run that TASKMESH_APP names, one at a time with every core.

    TASKMESH_APP=examples.digits:trainer TASKMESH_URL=redis://... python -m workers.gradient

It needs nothing but the address of Redis, and may come, go or be killed at any time. TASKMESH_CONCURRENCY changes how
many shards it computes at once, TASKMESH_QUEUES which queues it serves.
"""

from __future__ import annotations

from workers.program import run, serve


async def main() -> None:
    await serve(concurrency=1)


if __name__ == "__main__":
    run(main)

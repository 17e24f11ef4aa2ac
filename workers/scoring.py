"""A scorer: answers the rows of the Mesh that TASKMESH_APP names, gathered into batches.

    TASKMESH_APP=examples.digits:mesh TASKMESH_URL=redis://... python -m workers.scoring

TASKMESH_QUEUES keeps it to the scoring queues, so that no gradient shard holds a row up; TASKMESH_CONCURRENCY says how
many batches are under way at once.
"""

from __future__ import annotations

from workers.program import run, serve


async def main() -> None:
    await serve(concurrency=64)


if __name__ == "__main__":
    run(main)

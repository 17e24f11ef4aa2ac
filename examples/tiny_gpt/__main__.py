"""The master: trains, validates what is kept, and writes a sample at the end."""

from __future__ import annotations

import argparse
import math

from examples.program import parser, program
from examples.screen import Facts
from examples.tiny_gpt import SIZES, mesh, trainers
from examples.tiny_gpt.corpus import validation_rows
from examples.tiny_gpt.model import TinyGPT, generate
from examples.watch import Watch
from taskmesh import WorkerSettings

VALIDATION_ROWS = 64
PROMPT = "def "
SAMPLE_BYTES = 400


async def main(options: argparse.Namespace) -> None:
    size, trainer = SIZES[options.size], trainers[options.size]
    held_out = validation_rows(size.block, VALIDATION_ROWS)

    async def validate(version: int) -> float:
        losses = await trainer.predict(held_out, version=version, task_rows=16)  # by the workers
        return float(losses.mean())

    title = f"tiny_gpt ({options.size})"
    facts = Facts(options.steps or size.steps, samples_per_step=size.batch * size.block, sample_name="bytes")
    watch = Watch(trainer, title, facts, loss_unit="nats a byte", validate=validate, folder=options.out)
    # Two handlers at once: one computes a shard while the next is fetched; other workers get the rest.
    async with mesh.worker(WorkerSettings(concurrency=2)) if options.worker else mesh:
        async with watch:
            await trainer.run(steps=facts.steps, on_commit=watch.on_commit)
        model = await trainer.load()
    assert isinstance(model, TinyGPT)
    if (validation := watch.curve.validation) is not None:
        watch.say(f"validation: {validation:.4f} nats, or {validation / math.log(2):.3f} bits, a byte")
    watch.say(f"what it writes after {PROMPT!r}:\n")
    watch.say(generate(model.eval(), PROMPT, SAMPLE_BYTES))


if __name__ == "__main__":
    arguments = parser("tiny_gpt", __doc__)
    arguments.add_argument("--size", choices=SIZES, default="full", help="(default: %(default)s)")
    program(main, arguments)

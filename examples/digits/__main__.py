"""The master: trains, validates what is kept, and reads the held-out images at the end."""

from __future__ import annotations

import argparse

from torch.nn import functional

from examples.digits import BATCH, HELD_OUT, STEPS, images, labels, mesh, trainer
from examples.program import parser, program
from examples.screen import Facts
from examples.watch import Watch
from taskmesh import WorkerSettings


async def validate(version: int) -> float:
    """The loss on the held-out images, whose outputs the workers compute."""
    outputs = await trainer.predict(images[-HELD_OUT:], version=version)
    return float(functional.cross_entropy(outputs, labels[-HELD_OUT:]))


async def main(options: argparse.Namespace) -> None:
    facts = Facts(options.steps or STEPS, samples_per_step=BATCH, sample_name="images")
    watch = Watch(trainer, "digits", facts, loss_unit="nats an image", validate=validate, folder=options.out)
    # Two handlers at once: one computes a shard while the next is fetched; other workers get the rest.
    async with mesh.worker(WorkerSettings(concurrency=2)) if options.worker else mesh:
        async with watch:
            finished = await trainer.run(steps=facts.steps, on_commit=watch.on_commit)
        share = await trainer.evaluate(images[-HELD_OUT:], labels[-HELD_OUT:])
    watch.say(f"version {finished.version}: {share:.1%} of {HELD_OUT} held-out images are read correctly")


if __name__ == "__main__":
    program(main, parser("digits", __doc__))

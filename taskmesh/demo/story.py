"""The demo's story: train, crash, recover, poison, diverge, roll back, evaluate, score; then look at the books."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from subprocess import Popen

from taskmesh.demo import app
from taskmesh.demo.ledger import Books, keys_left
from taskmesh.demo.processes import Workers
from taskmesh.demo.report import Report
from taskmesh.demo.screen import Screen
from taskmesh.demo.stream import score_at_a_rate, score_flat_out
from taskmesh.errors import TaskmeshError, TrainingError
from taskmesh.monitoring.snapshot import snapshot

STEPS = 200
WORKERS = 3
KILL_AT, POISON_AT, PUSH_AT = 40, 80, 130
PUSH_FACTOR = 300.0
SCORING_SECONDS = 2.5
START_TIMEOUT = 60.0
TRAINING_TIMEOUT = 300.0


class Story:
    """One run of the demo, in the master's process."""

    def __init__(self, screen: Screen, workers: Workers) -> None:
        self._screen = screen
        self._workers = workers
        self._report = Report()
        self._books = Books()

    async def tell(self) -> Report:
        started = time.monotonic()
        say = self._screen.say
        doomed, *_ = [self._workers.start() for _ in range(WORKERS)]
        app.mesh.observers.add(self._books)
        async with app.mesh:
            await self._wait_for_workers(WORKERS)
            say(
                f"{WORKERS} workers are here ({time.monotonic() - started:.1f} s). Training on handwritten digits."
            )
            await self._train_among_mischief(doomed)
            await self._evaluate()
            await self._score()
            await self._close_books()
        self._report.seconds = round(time.monotonic() - started, 2)
        return self._report

    async def _wait_for_workers(self, count: int) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT
        while time.monotonic() < give_up_at:
            if len((await snapshot(app.mesh)).workers) >= count:
                return
            if any(process.poll() is not None for process in self._workers.processes):
                raise TaskmeshError(f"a worker ended while it started:\n{self._workers.log_tail()}")
            await asyncio.sleep(0.05)
        raise TaskmeshError(f"no {count} workers after {START_TIMEOUT:g} s:\n{self._workers.log_tail()}")

    # training, and what is done to it

    async def _train_among_mischief(self, doomed: Popen[bytes]) -> None:
        """Mischief that found no hold before the training was over is given up; the report then does not hold."""
        try:
            async with asyncio.timeout(TRAINING_TIMEOUT), asyncio.TaskGroup() as group:
                mischief = group.create_task(self._make_mischief(doomed))
                await self._train()
                await asyncio.wait({mischief}, timeout=1.0)
                mischief.cancel()
        except TimeoutError:
            raise TaskmeshError(
                f"training stood at step {self._books.steps} of {STEPS} after {TRAINING_TIMEOUT:g} s:\n"
                f"{self._workers.log_tail()}"
            ) from None

    async def _train(self) -> None:
        try:
            await app.trainer.run(steps=STEPS, on_commit=lambda committed: self._committed(committed.loss))
        except TrainingError as error:
            raise TrainingError(f"{error}\n{self._workers.log_tail()}") from None

    def _committed(self, loss: float) -> None:
        self._screen.step(self._books.steps, STEPS, loss)

    async def _until_step(self, step: int) -> None:
        await self._books.until(lambda: self._books.steps >= step)

    async def _make_mischief(self, doomed: Popen[bytes]) -> None:
        await self._kill_a_worker(doomed)
        await self._poison_a_shard()
        await self._force_a_divergence()

    async def _kill_a_worker(self, doomed: Popen[bytes]) -> None:
        await self._until_step(KILL_AT)
        held = await self._freeze_in_mid_step(doomed)
        self._screen.say(
            f"Step {self._books.steps}: SIGKILL to worker {doomed.pid}, which holds {held} shards."
        )
        doomed.kill()
        killed, step = time.monotonic(), self._books.steps
        self._workers.start()
        await self._until_step(step + 1)
        self._report.worker_killed_recovery_s = took = round(time.monotonic() - killed, 3)
        lease = app.mesh.settings.liveness_ttl
        self._screen.say(
            f"Recovered: its shards were taken over and step {step + 1} is committed, "
            f"{took:.2f} s after the kill (its lease is {lease:g} s)."
        )

    async def _freeze_in_mid_step(self, process: Popen[bytes]) -> int:
        """Stop a worker while it holds shards, so that the kill is sure to hit it in mid-step."""
        while True:
            process.send_signal(signal.SIGSTOP)
            for worker in (await snapshot(app.mesh)).workers:
                if f"-{process.pid}-" in worker.name and worker.holds:
                    return worker.holds
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(random.uniform(0.001, 0.02))

    async def _poison_a_shard(self) -> None:
        await self._until_step(POISON_AT)
        self._screen.say(f"Step {self._books.steps}: poisoning the loss of one shard with NaN.")
        app.POISON.touch()
        await self._books.until(lambda: bool(self._books.refused))
        refused = self._books.refused[0]
        step, shard, reason = refused.step, refused.shard, refused.reason
        self._screen.say(f"Shard {shard} of step {step} was refused ({reason}) and computed anew.")

    async def _force_a_divergence(self) -> None:
        await self._until_step(PUSH_AT)
        self._screen.say(f"Step {self._books.steps}: the learning rate times {PUSH_FACTOR:g}.")
        app.Push.factor = PUSH_FACTOR
        await self._books.until(lambda: bool(self._books.rollbacks))
        app.Push.factor = 1.0
        rolled_back = self._books.rollbacks[0]
        self._screen.say(
            f"Diverged, and rolled back by itself: {rolled_back.reason.partition(';')[0]}. "
            f"Version {rolled_back.restored} is current again, as version {rolled_back.version}."
        )

    # what it was trained for

    async def _evaluate(self) -> None:
        images, labels = app.images[-app.HELD_OUT :], app.labels[-app.HELD_OUT :]
        self._report.accuracy = round(await app.trainer.evaluate(images, labels), 4)
        self._screen.say(f"Held-out images read correctly: {self._report.accuracy:.1%} of {app.HELD_OUT}.")

    async def _score(self) -> None:
        self._screen.say("Scoring the images row by row, as they come ...")
        flat_out = await score_flat_out(SCORING_SECONDS)
        paced = await score_at_a_rate(flat_out.rows_per_s / 2, SCORING_SECONDS)
        self._report.rows_scored = flat_out.rows + paced.rows
        self._report.rows_per_s = round(flat_out.rows_per_s, 1)
        self._report.score_p99_s = round(paced.p99_s, 5)
        self._screen.say(
            f"{flat_out.rows_per_s:,.0f} rows/s flat out; at half of that, 99% of the rows have their score "
            f"within {paced.p99_s * 1000:.0f} ms."
        )

    async def _close_books(self) -> None:
        report, books, client = self._report, self._books, app.mesh.client
        report.steps = books.steps
        report.rollbacks = len(books.rollbacks)
        report.shards_refused = len(books.refused)
        report.uplink_bytes_saved_ratio = round(1 - books.uplink_bytes / books.dense_bytes, 4)
        report.tasks_lost, report.tasks_settled_twice = await books.outcomes_missing(client)
        await asyncio.to_thread(self._workers.drain)
        links = {id(caller): caller.server.link(b"") for caller in (client.caller, client.bulk)}
        keys = app.trainer.store.keys
        wanted = {keys.lease, keys.current, keys.history, keys.ledger}
        for version in await app.trainer.versions():
            wanted.update(version.keys(keys))
        left = await keys_left(links.values(), wanted)
        report.keys_leaked = len(left)
        for key in left[:10]:
            self._screen.say(f"left behind: {key}")

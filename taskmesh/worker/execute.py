"""Running handlers: up to ``concurrency`` at once, in order of priority.

Runners are asyncio tasks that take what is ready, one message after the other. A runner whose handler suspends
belongs to that message from then on, and others go on with what is ready (see ``taskmesh.worker.drive``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from taskmesh.errors import InvalidArguments
from taskmesh.messages import Status
from taskmesh.settings import WorkerSettings
from taskmesh.tasks import TaskDefinition
from taskmesh.worker.batching import Batcher
from taskmesh.worker.calls import Calls
from taskmesh.worker.deliveries import Delivery
from taskmesh.worker.drive import LoopGone, drive
from taskmesh.worker.eager import start_now
from taskmesh.worker.endings import Endings
from taskmesh.worker.isolate import Isolated
from taskmesh.worker.ready import Ready
from taskmesh.worker.runs import Run

log = logging.getLogger("taskmesh.worker")
TIME_SLICE = 0.002


class Executor:
    """Runs what the fetchers bring.

    Attributes:
        isolated: the line before the processes.
        active: handlers that are under way beyond a runner's current step.
        current: start and time limit of a handler's first step, for the watchdog.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        endings: Endings,
        calls: Calls,
        isolated: Isolated,
        on_room: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._endings = endings
        self._calls = calls
        self._on_room = on_room
        self.isolated = isolated
        self._ready = Ready()
        self._runs: set[Run] = set()
        self._runners: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._batchers: dict[str, Batcher] = {}
        self.active = 0
        self.current: tuple[float, float] | None = None

    @property
    def waiting(self) -> int:
        """Deliveries that have not started."""
        waiting = len(self._ready) + sum(batcher.waiting for batcher in self._batchers.values())
        return waiting + len(self.isolated) if self.isolated else waiting

    @property
    def free(self) -> int:
        """Slots that nothing runs in and nothing waits for."""
        return self._settings.concurrency - self.active - self.waiting

    def accept(self, delivery: Delivery) -> None:
        """Queue a delivery; call ``dispatch`` after the last one."""
        if (delivery.deliveries > 1 or delivery.task.options.process) and self.isolated.takes(delivery):
            self.isolated.add(delivery)
        else:
            self._ready.add(delivery)

    def dispatch(self) -> None:
        """See that what is ready is looked at."""
        if self.isolated:
            self._start_in_processes()
        if not self._starting and self.active < self._settings.concurrency and self._ready:
            self._start_runners(1)

    def _start_runners(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            self._keep(loop.create_task(self._runner()))
        self._starting += count

    def _keep(self, runner: asyncio.Task[None]) -> None:
        self._runners.add(runner)
        runner.add_done_callback(self._runners.discard)

    async def _runner(self) -> None:
        slice_end = time.monotonic() + TIME_SLICE
        concurrency = self._settings.concurrency
        while self.active < concurrency:
            delivery = self._ready.next()
            if delivery is None:
                break
            if delivery.task.options.batch is not None:
                self._batcher(delivery.task).add(delivery)
                continue
            if await self._run(delivery):
                self._release()
                return
            now = time.monotonic()
            if now > slice_end:
                self._on_room()  # the next fetch is on its way while the rest of the stock is worked at
                await asyncio.sleep(0)
                slice_end = time.monotonic() + TIME_SLICE
        self._starting -= 1
        if self.active < concurrency:
            self._on_room()

    def _release(self) -> None:
        """A slot is free again."""
        self.active -= 1
        if self.isolated:
            self._start_in_processes()
        if self.active + self._starting < self._settings.concurrency and self._ready:
            # At once: behind everybody who has just woken up, the slot would stand empty meanwhile.
            self._starting += 1
            self._keep(start_now(self._runner()))
        for batcher in self._batchers.values():
            batcher.flush()
        self._on_room()

    def _suspended(self, run: Run, timeout: float | None) -> None:
        """A handler has suspended: its runner is its own now, and others take over what is ready."""
        self._starting -= 1
        self.active += 1
        self._runs.add(run)
        run.task = asyncio.current_task()
        self.current = None
        if timeout is not None:
            remaining = timeout - (time.monotonic() - run.started)
            run.timer = asyncio.get_running_loop().call_later(max(0.0, remaining), self.stop, run, "timeout")
        wanted = min(self._settings.concurrency - self.active, len(self._ready)) - self._starting
        if wanted > 0:
            self._start_runners(wanted)

    async def _run(self, delivery: Delivery) -> bool:
        """Run one message's handler and end it; True when it suspended on the way."""
        task, message = delivery.task, delivery.message
        started = time.monotonic()
        timeout = task.options.timeout
        try:
            args, kwargs = task.signature.convert(message.args, message.kwargs)
        except Exception as error:
            self._not_taken(delivery, error)
            return False
        context = self._calls.context_if_wanted(delivery)
        run: Run | None = None

        def on_suspend() -> None:
            nonlocal run
            run = Run([delivery], started, context, in_thread=not task.is_async)
            self._suspended(run, timeout)

        self.current = None if timeout is None else (started, timeout)
        try:
            value = await drive(self._calls.make(task, args, kwargs, context), on_suspend)
        except asyncio.CancelledError as error:
            self._stopped(run, delivery, error)
        except Exception as error:
            if run is None or delivery.order not in run.ended:
                unwanted = run is not None and run.reason == "cancelled"  # nobody wants another try
                self._endings.failed(delivery, error, time.monotonic() - started, final=unwanted)
        except LoopGone:
            return True
        except BaseException as error:
            self._endings.failed(delivery, error, time.monotonic() - started, final=True)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            if run is None or delivery.order not in run.ended:
                self._endings.succeeded(delivery, value, time.monotonic() - started)
        if run is None:
            self.current = None
            return False
        self._forget(run)
        return True

    def _not_taken(self, delivery: Delivery, error: Exception) -> None:
        """The arguments do not fit, or a type of the user's raised over them."""
        if isinstance(error, InvalidArguments):
            self._endings.misfit(delivery, error, self._settings.misfit_patience)
        else:
            self._endings.failed(delivery, error, 0.0, final=True)

    def _forget(self, run: Run) -> None:
        self._runs.discard(run)
        self._forget_timer(run)

    def _forget_timer(self, run: Run) -> None:
        if run.timer is not None:
            run.timer.cancel()

    def _stopped(self, run: Run | None, delivery: Delivery, error: BaseException) -> None:
        """A handler let a CancelledError out: end it as the reason says."""
        seconds = 0.0 if run is None else time.monotonic() - run.started
        reason = None if run is None else run.reason
        if run is not None and delivery.order in run.ended:
            return
        if reason == "cancelled":
            self._endings.dropped(delivery, Status.CANCELLED, seconds)
        elif reason == "timeout":
            limit = delivery.task.options.timeout
            self._endings.failed(delivery, TimeoutError(f"the handler ran longer than {limit:g} s"), seconds)
        elif reason is None:
            self._endings.failed(delivery, error, seconds)
        # "drain": it stays held, and the drain hands it back

    # processes

    def _start_in_processes(self) -> None:
        while self.active < self._settings.concurrency:
            delivery = self.isolated.next()
            if delivery is None:
                return
            self.active += 1
            self._keep(asyncio.get_running_loop().create_task(self._run_in_process(delivery)))

    async def _run_in_process(self, delivery: Delivery) -> None:
        run = Run([delivery], time.monotonic(), None, in_process=True)
        run.task = asyncio.current_task()
        self._runs.add(run)
        try:
            await self.isolated.run(delivery, lambda: self._time(run))
        except asyncio.CancelledError as error:
            self._stopped(run, delivery, error)
        except Exception as error:
            self._not_taken(delivery, error)
        finally:
            self._forget(run)
            self._release()

    def _time(self, run: Run) -> None:
        """The handler begins now: its time counts from here, in each process that it is tried in."""
        self._forget_timer(run)
        run.started = time.monotonic()
        timeout = run.deliveries[0].task.options.timeout
        if timeout is not None:
            run.timer = asyncio.get_running_loop().call_later(timeout, self.stop, run, "timeout")

    # batches

    def _batcher(self, task: TaskDefinition) -> Batcher:
        batcher = self._batchers.get(task.name)
        if batcher is None:
            batch = task.options.batch
            assert batch is not None
            batcher = self._batchers[task.name] = Batcher(batch, self._take_batch)
        return batcher

    def _take_batch(self, deliveries: list[Delivery]) -> bool:
        """Start a batch in a slot of its own; False when none is free."""
        if self.active >= self._settings.concurrency:
            return False
        self.active += 1
        self._keep(asyncio.get_running_loop().create_task(self._run_batch(deliveries)))
        return True

    async def _run_batch(self, deliveries: list[Delivery]) -> None:
        task = deliveries[0].task
        context = self._calls.context(deliveries[0])
        run = Run(deliveries, time.monotonic(), context, in_thread=not task.is_async)
        run.task = asyncio.current_task()
        if task.options.timeout is not None:
            run.timer = asyncio.get_running_loop().call_later(task.options.timeout, self.stop, run, "timeout")
        self._runs.add(run)
        items: list[tuple[Delivery, Any]] = []
        for delivery in deliveries:
            try:
                args, _ = task.signature.convert(delivery.message.args, delivery.message.kwargs)
                items.append((delivery, args[0]))
            except Exception as error:
                self._not_taken(delivery, error)
        try:
            if items:
                await self._run_rows(run, items)
        finally:
            self._forget(run)
            self._release()

    async def _run_rows(self, run: Run, items: list[tuple[Delivery, Any]]) -> None:
        """Call the handler with these rows; where it raises, with each half, until the row at fault is alone."""
        task = items[0][0].task
        context = run.context
        assert context is not None
        try:
            values = await drive(self._calls.make(task, ([row for _, row in items],), {}, context), _nothing)
            if not isinstance(values, Iterable) or len(rows := list(values)) != len(items):
                raise TypeError(
                    f"batch handler of {task.name!r} must return one result for each of its {len(items)} rows"
                )
        except asyncio.CancelledError as error:
            for delivery, _ in items:
                self._stopped(run, delivery, error)
            if (current := asyncio.current_task()) is not None:
                current.uncancel()
            return
        except Exception as error:
            if len(items) == 1:
                if items[0][0].order not in run.ended:
                    seconds, unwanted = time.monotonic() - run.started, run.reason == "cancelled"
                    self._endings.failed(items[0][0], error, seconds, final=unwanted)
                return
            half = len(items) // 2
            await self._run_rows(run, items[:half])
            await self._run_rows(run, items[half:])
            return
        seconds = time.monotonic() - run.started
        for (delivery, _), value in zip(items, rows, strict=True):
            if delivery.order in run.ended:
                continue
            if isinstance(value, Exception):
                self._endings.failed(delivery, value, seconds)
            else:
                self._endings.succeeded(delivery, value, seconds)

    # stopping

    def stop(self, run: Run, reason: str) -> None:
        """Stop a run: "cancelled", "timeout" or "drain". A thread cannot be stopped: it is ended early, and its
        slot is free when it returns."""
        if run.reason is not None:
            return
        run.reason = reason
        if run.context is not None:
            run.context._cancelled.set()
        if run.in_thread and reason != "drain":
            for delivery in run.deliveries:
                self._stopped(run, delivery, asyncio.CancelledError())
                run.ended.add(delivery.order)
            log.warning(
                "%s: it runs in a thread and cannot be stopped; its slot stays taken",
                run.deliveries[0].task,
            )
        elif run.task is not None:
            run.task.cancel()

    def cancel(self, delivery: Delivery) -> bool:
        """Someone wants this message cancelled: drop it if it has not started, stop it if it runs.

        False when it is not here: its arguments are still on their way, or it has ended.
        """
        for run in self._runs:
            if delivery in run.deliveries:
                if len(run.deliveries) == 1:
                    self.stop(run, "cancelled")
                elif delivery.order not in run.ended:
                    run.ended.add(delivery.order)  # the rows beside it go on
                    self._endings.dropped(delivery, Status.CANCELLED)
                return True
        waited = self._ready.remove(delivery) or self.isolated.remove(delivery)
        if waited or any(b.remove(delivery) for b in self._batchers.values()):
            self._endings.dropped(delivery, Status.CANCELLED)
            return True
        return False

    def take_waiting(self) -> list[Delivery]:
        """Everything that has not started; it is the caller's now."""
        taken = self._ready.take() + self.isolated.take()
        for batcher in self._batchers.values():
            taken += batcher.take()
        return taken

    def longest_timeout(self) -> float | None:
        """The longest that a handler under way may take; None when one has no limit, or none runs. Any thread."""
        try:
            runs = [run for run in self._runs if not run.in_process]
            timeouts = [delivery.task.options.timeout for run in runs for delivery in run.deliveries]
        except RuntimeError:  # the runs have changed meanwhile: the loop is at work
            return None
        limits = [timeout for timeout in timeouts if timeout is not None]
        return max(limits) if limits and len(limits) == len(timeouts) else None

    def oldest_wait(self, now: float) -> float:
        """Seconds that the delivery that has waited longest for a slot has waited."""
        return self._ready.oldest_wait(now)

    def abandon(self) -> None:
        """Forget what waits and cut off what runs."""
        self.take_waiting()
        for run in list(self._runs):
            self.stop(run, "drain")
        for runner in self._runners:
            runner.cancel()
        self._calls.close()
        self.isolated.close()

    async def drain(self, timeout: float) -> None:
        """Wait for the handlers under way, then cancel them. One that swallows even that is left behind."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout
        while self._runners and loop.time() < give_up_at:
            await asyncio.wait(self._runners, timeout=max(0.0, give_up_at - loop.time()))
        for run in list(self._runs):
            self.stop(run, "drain")
        if self._runners:
            await asyncio.wait(self._runners, timeout=1.0)
        self._calls.close()
        self.isolated.close()


def _nothing() -> None:
    pass

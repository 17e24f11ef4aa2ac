"""Plays a schedule: acts as it says, heals the world, and sees whether everything came out as promised."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from taskmesh import Priority, WorkerSettings
from taskmesh.errors import BrokerFull, BrokerUnavailable, QueueFull, TaskmeshError
from tests.schedules import steps as s
from tests.schedules import tasks
from tests.schedules.model import Sent
from tests.schedules.node import Backend, message_id
from tests.schedules.world import MESH, QUEUE, Process, WorkerProcess, World

QUIET_WITHIN = 60.0
LEAVE_WITHIN = 60.0
STEP_LIMIT = 2.0
MAX_WORKERS = 5
DRAIN_TIMEOUT = 0.4
KNOWS = (tasks.KINDS, tuple(kind for kind in tasks.KINDS if kind != "retried"))


class Broken(AssertionError):
    """A promise was broken; the text says which, by what schedule."""


class Producer(Process):
    """A program that submits."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.tasks = tasks.register(self.mesh, self, tasks.KINDS)
        self._leave = asyncio.Event()
        self.is_ready = False
        self.pending: set[asyncio.Task[Any]] = set()
        self._current: Iterator[Sent] = iter(())
        self.begin(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self.mesh.__aenter__()
                break
            except TaskmeshError:
                await asyncio.sleep(0.2)
        self._watch_ids()
        self.is_ready = True
        await self._leave.wait()
        await self.mesh.__aexit__(None, None, None)
        self.exited()

    def _watch_ids(self) -> None:
        """See which id each message gets: it is made before anything is sent."""
        client = self.mesh.client
        new_id = client.new_id

        def watched(partition: int = 0) -> str:
            id = new_id(partition)
            self.world.model.identified(self._sent, id)
            return id

        client.new_id = watched  # type: ignore[method-assign]

    def leave(self) -> None:
        self.loop.call_soon(self._leave.set)

    def do(self, coroutine: Any) -> None:
        task = self.begin(coroutine)
        self.pending.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.pending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.has_ended:
            self.world.model.violation(f"{self.name}: {error!r}")

    def _task(self, plan: s.Plan) -> Any:
        changes: dict[str, Any] = {"priority": Priority(plan.lane)}
        if plan.expires:
            changes["expires"] = plan.expires
        if not plan.keeps_result:
            changes["result_ttl"] = 0.0
        return self.tasks[plan.task].options(**changes)

    async def submit(self, sent: Sent) -> None:
        plan = sent.plan
        pad = tasks.PAD if plan.large else ""
        try:
            self._sent = sent
            if plan.delay:
                sent.handle = await self._task(plan).submit_in(plan.delay, sent.number, pad)
            else:
                sent.handle = await self._task(plan).submit(sent.number, pad)
        except TaskmeshError as error:
            sent.heard = _heard(error)
            self.world.note(self.name, f"submit {sent.number}: {error}")
            return
        await self._accepted(sent)

    async def submit_many(self, many: list[Sent]) -> None:
        task = self._task(many[0].plan)
        pad = tasks.PAD if many[0].plan.large else ""

        def items() -> Iterator[Any]:
            for sent in many:
                self._sent = sent
                yield task.bind(sent.number, pad)

        try:
            handles = await task.submit_many(items())
        except TaskmeshError as error:
            self.world.note(self.name, f"bulk from {many[0].number}: {error}")
            for sent in many:
                sent.heard = "unknown"
            return
        for sent, handle in zip(many, handles, strict=True):
            sent.handle = handle
            self.do(self._accepted(sent))

    async def _accepted(self, sent: Sent) -> None:
        sent.heard = "accepted"
        if sent.handle.id != sent.id:
            self.world.model.violation(f"message {sent.number}: its handle is another's")
        if sent.plan.keeps_result:
            sent.outcome = await sent.handle.outcome()

    async def cancel(self, sent: Sent) -> None:
        own = sent.handle if sent.producer == self.name else None
        handle = own or self._task(sent.plan).handle(sent.id)
        sent.is_asked_for = True
        try:
            answer = await handle.cancel()
        except TaskmeshError as error:
            self.world.note(self.name, f"cancel {sent.number}: {error}")
            return
        self.world.note(self.name, f"cancel {sent.number}: {answer}")
        self.world.model.heard_of_cancel(sent, answer)


def _heard(error: TaskmeshError) -> str:
    if isinstance(error, QueueFull | BrokerFull):
        return "refused"
    assert isinstance(error, BrokerUnavailable), repr(error)
    return "unknown"


class Player:
    """Plays one schedule in one world."""

    def __init__(self, backend: Backend, schedule: s.Schedule) -> None:
        self.world = World(backend, schedule.setting)
        self._schedule = schedule
        self._producers: list[Producer] = []
        self._count = 0

    def play(self) -> None:
        """Raises Broken when a promise was not kept."""
        world = self.world
        with world.governing():
            try:
                self._play()
            finally:
                self._dispose()

    def _play(self) -> None:
        world = self.world
        self._new_producer()
        for step in self._schedule.steps:
            until, limit = world.points + step.points, world.timeline.now + step.seconds
            world.timeline.run(self._broken, limit)
            world.timeline.run(
                lambda until=until: world.points >= until or self._broken(), limit + STEP_LIMIT
            )
            self._check()
            self._act(step.action)
        self._heal()
        self._await(self._is_quiet, QUIET_WITHIN, self._unquiet)
        self._leave()
        self._look_at_what_is_left()
        self._check()

    def _broken(self) -> bool:
        return bool(self.world.model.violations)

    def _check(self) -> None:
        if self._broken():
            raise Broken("; ".join(self.world.model.violations[:3]))

    def _await(self, condition: Any, seconds: float, what: Any) -> None:
        timeline = self.world.timeline
        limit = timeline.now + seconds
        while not condition():
            self._check()
            if timeline.now >= limit:
                raise Broken(f"after {seconds:g} s {what()}")
            timeline.run(self._broken, timeline.now + 0.25)
        self._check()

    # acting

    def _new_producer(self) -> Producer:
        producer = Producer(self.world, f"producer-{len(self._producers)}")
        self._producers.append(producer)
        return producer

    def _producer(self, number: int) -> Producer:
        alive = [each for each in self._producers if not each.has_ended]
        return alive[number % len(alive)] if alive else self._new_producer()

    def _worker(self, number: int) -> WorkerProcess | None:
        alive = [each for each in self.world.alive if isinstance(each, WorkerProcess)]
        return alive[number % len(alive)] if alive else None

    def _start(self, concurrency: int, knows: int) -> None:
        self._count += 1
        settings = WorkerSettings(
            queues=(QUEUE,), concurrency=concurrency, drain_timeout=DRAIN_TIMEOUT, hand_back_after=0.5
        )
        WorkerProcess(self.world, f"worker-{self._count}", settings, KNOWS[knows])

    def _act(self, action: s.Action) -> None:
        world = self.world
        if not isinstance(action, s.SetTrap):
            world.note("schedule", repr(action))
        match action:
            case s.Submit(plan, number):
                producer = self._producer(number)
                if producer.is_ready:
                    producer.do(producer.submit(world.model.new(plan, producer.name)))
            case s.Bulk(plan, count, number):
                producer = self._producer(number)
                if producer.is_ready:
                    many = [world.model.new(plan, producer.name) for _ in range(count)]
                    producer.do(producer.submit_many(many))
            case s.Cancel(number):
                self._cancel(number)
            case s.Finish():
                self._open_gates()
            case s.Start(concurrency, knows):
                if sum(isinstance(each, WorkerProcess) for each in world.alive) < MAX_WORKERS:
                    self._start(concurrency, knows)
            case s.CrashProducer(number):
                self._producer(number).crash()
                self._producer(0)
            case s.Cut(number):
                for process in world.alive[number % max(1, len(world.alive)) :][:1]:
                    process.cut()
            case s.Restart(seconds):
                world.restart_server(seconds)
            case s.Pause(seconds):
                world.pause_server(seconds)
            case s.Fill(seconds):
                world.fill_server(seconds)
            case s.Jump(seconds):
                world.node.jumped_ms += int(seconds * 1000)
            case s.SetTrap():
                alive = world.alive
                name = alive[action.process % len(alive)].name if alive and action.process >= 0 else ""
                world.traps.append(s.Trap(action, name))
            case _:
                self._act_on_worker(action)

    def _act_on_worker(self, action: Any) -> None:
        worker = self._worker(action.worker)
        if worker is None:
            return
        match action:
            case s.Drain():
                worker.drain()
            case s.Crash():
                worker.crash()
            case s.Stall(_, seconds):
                worker.freeze(seconds)
            case s.Block(_, seconds):
                worker.block(seconds)

    def _cancel(self, number: int) -> None:
        known = [sent for sent in self.world.model.messages if sent.id]
        if known:
            sent = known[number % len(known)]
            producer = self._producer(0)
            if producer.is_ready:
                producer.do(producer.cancel(sent))

    def _open_gates(self) -> None:
        gates, self.world.model.gates = self.world.model.gates, []
        for gate in gates:
            if not gate.done():
                gate.set_result(None)

    # the end

    def _heal(self) -> None:
        world = self.world
        world.note("schedule", "everything is healed")
        world.is_healed = True
        world.traps.clear()
        world.unfill_server()
        world.node.is_up, world.node.resumes_at = True, 0.0
        for process in world.alive:
            process.thaw()
        self._producer(0)
        self._open_gates()
        self._start(4, 0)

    def _keys(self, what: str) -> list[str]:
        partitions = range(self._schedule.setting.partitions)
        return [f"taskmesh:{{{MESH}:{QUEUE}:{number}}}:{what}" for number in partitions]

    def _lanes(self) -> list[str]:
        return [key for lane in ("high", "normal", "low") for key in self._keys(f"tasks:{lane}")]

    def _unquiet(self) -> str:
        lanes = {key: self.world.node.ask(("XRANGE", key, "-", "+"))[0] for key in self._lanes()}
        ids = [message_id(fields[1]) for rows in lanes.values() for _, fields in rows]
        waiting = [each.name for each in self._producers if each.pending and not each.has_ended]
        names = [self.world.model.name(id) for id in ids]
        names += [
            str(self.world.node.ask(("ZRANGE", key, 0, -1, "WITHSCORES"))) for key in self._keys("delayed")
        ]
        registered = self.world.node.ask(*(("ZRANGE", key, 0, -1) for key in self._keys("workers")))
        return f"not quiet: in the queue {names}, waiting {waiting}, workers {registered}"

    def _is_quiet(self) -> bool:
        """Nothing lies in the queue, everybody who waits has heard, and only those alive are on the list."""
        world = self.world
        if any(each.pending for each in self._producers if not each.has_ended):
            return False
        keys = [("XLEN", key) for key in self._lanes()]
        keys += [("ZCARD", key) for key in self._keys("delayed")]
        if any(world.node.ask(*keys)):
            return False
        workers = [each for each in world.alive if isinstance(each, WorkerProcess)]
        if any(each.is_draining or each.worker is None for each in workers):
            return False
        for each in workers:
            each.look_at_loops()
        serving = {source.worker for each in workers for source in each.worker._sources}  # type: ignore[union-attr]
        listed = world.node.ask(*(("ZRANGE", key, 0, -1) for key in self._keys("workers")))
        return all(set(names) <= serving for names in listed)

    def _leave(self) -> None:
        """Everybody leaves, the workers first."""
        for kind in (WorkerProcess, Producer):
            leaving = [each for each in self.world.alive if isinstance(each, kind)]
            for process in leaving:
                process.drain() if isinstance(process, WorkerProcess) else process.leave()
            self._await(
                lambda leaving=leaving: all(each.has_ended for each in leaving),
                LEAVE_WITHIN,
                lambda leaving=leaving: (
                    f"{[each.name for each in leaving if not each.has_ended]} still drain"
                ),
            )

    def _look_at_what_is_left(self) -> None:
        """D1 and D3: nothing is left but what has a time to live, and dead letters."""
        ask = self.world.node.ask
        left: Counter[str] = Counter()
        for rows in ask(*(("XRANGE", key, "-", "+") for key in self._lanes())):
            left.update(message_id(fields[1]) for _, fields in rows)
        dead: Counter[str] = Counter()
        for rows in ask(*(("XRANGE", key, "-", "+") for key in self._keys("dead"))):
            dead.update(message_id(fields[1]) for _, fields in rows)
        self.world.model.close(left, dead)
        keys = ask(("KEYS", "*"))[0]
        lasting = {
            key.decode()
            for key, ttl in zip(keys, ask(*(("TTL", key) for key in keys)) if keys else (), strict=True)
            if ttl == -1
        }
        lasting -= set(self._keys("dead"))
        failed_blobs = {key for key in lasting if ":blob:" in key and key.split(":blob:")[1][:20] in dead}
        self.world.model.require(
            lasting == failed_blobs, f"D3: keys are left: {sorted(lasting - failed_blobs)}"
        )

    def _dispose(self) -> None:
        world = self.world
        for process in world.processes:
            process.has_ended = True
        for process in world.processes:
            process.dispose()
        world.processes.clear()
        world.model.gates.clear()
        for sent in world.model.messages:
            sent.handle = None
        world.unfill_server()
        world.node.ask(("FLUSHALL",))


def play(backend: Backend, schedule: s.Schedule) -> World:
    """Play a schedule to its end.

    Raises:
        Broken: a promise was not kept.
    """
    log = logging.getLogger("taskmesh")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        player = Player(backend, schedule)
        player.play()
        return player.world
    finally:
        log.setLevel(level)

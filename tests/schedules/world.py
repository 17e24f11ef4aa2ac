"""One schedule's world: the processes, the server between them, and what goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from taskmesh import Mesh, MeshSettings, QueueOptions, WorkerSettings
from taskmesh.app import client as client_module
from taskmesh.broker import caller
from taskmesh.broker.connect import Server
from taskmesh.broker.link import Command, error_of_reply
from taskmesh.errors import TaskmeshError
from taskmesh.worker import membership, upkeep
from taskmesh.worker.heartbeat import Host
from taskmesh.worker.lease import Keeper, Place
from taskmesh.worker.runtime import Worker
from tests.schedules import tasks, wires
from tests.schedules.loop import Timeline, VirtualLoop
from tests.schedules.model import Model
from tests.schedules.node import Backend, Node
from tests.schedules.steps import Setting, Trap

MESH = "schedule"
QUEUE = "default"
RETRY_FOR = 2.0
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class World:
    """Everything that takes part. ``governing`` puts the engine into it."""

    def __init__(self, backend: Backend, setting: Setting) -> None:
        self.setting = setting
        self._noise = random.Random(setting.noise) if setting.noise else None
        self.timeline = Timeline(self._noise)
        self.model = Model(self.timeline, setting)
        self.node = Node(backend, self.timeline, self._saw)
        self.processes: list[Process] = []
        self.traps: list[Trap] = []
        self.points = 0
        self.running: wires.Connection | None = None
        self.is_healed = False
        self.trace: list[tuple[float, str, str]] = []
        self._names = itertools.count(1)
        self._numbers = itertools.count(1)

    @contextmanager
    def governing(self) -> Iterator[None]:
        """While it lasts, the engine connects through this world, by its time and with its names."""
        with ExitStack() as stack:
            stack.enter_context(self.timeline.governing())
            stack.enter_context(patch.object(Server, "connect", wires.connect))
            stack.enter_context(patch.object(client_module, "new_producer", self._new_producer))
            stack.enter_context(patch.object(membership, "new_worker_name", self._new_worker_name))
            stack.enter_context(patch.object(membership, "new_heartbeat", SimulatedHeartbeat))
            for module in (caller, upkeep):
                stack.enter_context(patch.object(module, "_random", random.Random(self.setting.noise)))
            yield

    def _new_producer(self) -> str:
        name = f"p{next(self._names):011d}"
        self.node.watched[f"taskmesh:{{{MESH}:{QUEUE}:0}}:replies:{name}".encode()] = b"0-0"
        self.node.watched[f"taskmesh:{{{MESH}:{QUEUE}:1}}:replies:{name}".encode()] = b"0-0"
        return name

    def _new_worker_name(self) -> bytes:
        return f"w{next(self._names)}".encode()

    def next_number(self) -> int:
        return next(self._numbers)

    def latency(self) -> float:
        """Seconds that a command or a reply is on its way."""
        if self._noise is None:
            return 0.0005
        rare = self._noise.random()
        return self._noise.random() * (0.03 if rare < 0.04 else 0.001)

    def is_interrupted(self) -> bool:
        """Whether others are served between two commands that were sent together."""
        return self._noise is not None and self._noise.random() < 0.2

    def note(self, who: str, what: str) -> None:
        self.trace.append((self.timeline.now, who, what))

    # what is on its way

    def kind_of(self, command: Command) -> str:
        name = str(command[0])
        if name in ("EVALSHA", "EVAL"):
            return tasks.SCRIPT_NAMES.get(command[1], "eval")  # type: ignore[arg-type]
        return name.lower()

    def step_in(self, connection: wires.Connection, command: Command, when: str) -> bool:
        """A point at which something may happen; True when the command is not to be run now."""
        self.points += 1
        kind = self.kind_of(command)
        self.note(connection.process.name, f"{when} {kind}" if when == "before" else f"{kind} done")
        for trap in self.traps:
            if trap.springs(connection.process.name, kind, when):
                self.traps.remove(trap)
                return self._spring(trap, connection)
        return False

    def _spring(self, trap: Trap, connection: wires.Connection) -> bool:
        process = connection.process
        self.note(process.name, f"TRAP {trap.effect} {trap.seconds:g}")
        if trap.effect == "cut":
            connection.cut()
        elif trap.effect == "crash":
            connection.cut()
            process.crash()
        elif trap.effect == "hold":
            connection.hold(trap.seconds, trap.when)
        elif trap.effect == "refuse":
            if trap.when == "before":
                connection.refuse(error_of_reply("BUSY Redis is busy running a script.", wires.WHERE))
            return False
        elif trap.effect == "stall":
            process.freeze(trap.seconds)
            return False
        elif trap.effect == "drain":
            process.drain()
            return False
        return trap.when == "before"

    def _saw(self, name: str, keys: Any, arguments: Any, reply: Any, looks: Any) -> None:
        assert self.running is not None
        handler: Callable[..., None] | None = getattr(self.model, f"saw_{name}", None)
        if handler is not None:
            handler(self.running.process.name, keys, arguments, reply, looks)
        if name in ("settle", "cancel"):
            for stream, entries in zip(list(self.node.watched), looks, strict=True):
                for entry_id, fields in entries:
                    self.node.watched[stream] = entry_id
                    self.model.saw_pushes(fields)

    # what happens to everybody

    def cut_all(self) -> None:
        for process in self.processes:
            process.cut()

    def restart_server(self, seconds: float) -> None:
        """It is away for so long, and has forgotten the scripts; what it holds is as it was."""
        self.note("server", f"restart, away for {seconds:g}")
        self.node.is_up = False
        self.node.forget_scripts()
        self.cut_all()
        self.timeline.at(self.timeline.now + seconds, self._server_is_back)

    def _server_is_back(self) -> None:
        self.note("server", "back")
        self.node.is_up = True

    def pause_server(self, seconds: float) -> None:
        """It answers nobody for so long, and then everybody who has asked meanwhile."""
        self.note("server", f"stopped for {seconds:g}")
        self.node.resumes_at = self.timeline.now + seconds

    def fill_server(self, seconds: float) -> None:
        """It is at its memory limit for so long."""
        self.note("server", f"full for {seconds:g}")
        self.node.ask(("CONFIG", "SET", "maxmemory", "1"))
        self.timeline.at(self.timeline.now + seconds, self.unfill_server)

    def unfill_server(self) -> None:
        self.node.ask(("CONFIG", "SET", "maxmemory", "0"))

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.has_ended]


class Process:
    """A process of the program: its Mesh, and a worker or what is submitted.

    Attributes:
        has_ended: it has exited, or crashed.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.connections: list[wires.Connection] = []
        self.loop = VirtualLoop(world.timeline, self)
        self.loops = [self.loop]
        self.has_ended = False
        self.has_crashed = False
        self.mesh = Mesh(
            MESH,
            settings=MeshSettings(
                url=wires.URL,
                liveness_ttl=world.setting.ttl,
                retry_for=RETRY_FOR,
                result_ttl=600.0,
                inline_limit_bytes=tasks.INLINE_LIMIT,
            ),
            queues={
                QUEUE: QueueOptions(
                    partitions=world.setting.partitions,
                    max_length=world.setting.bound,
                    when_full=world.setting.when_full,
                    wait_timeout=3.0,
                )
            },
        )
        self.tasks: dict[str, Any] = {}
        world.processes.append(self)

    def begin(self, coroutine: Any) -> asyncio.Task[Any]:
        """A task in its loop."""
        return self.loop.create_task(coroutine)

    def crash(self) -> None:
        """No more is heard of it; what it has sent is under way all the same."""
        if self.has_ended:
            return
        self.world.note(self.name, "CRASH")
        self.has_ended = self.has_crashed = True
        for connection in list(self.connections):
            connection.give_up(wires.BrokerUnavailable("crashed"))
        for loop in self.loops:
            loop.frozen_until = float("inf")
        self.world.model.ended_process(self.name)

    def cut(self) -> None:
        """Lose all its connections."""
        for connection in list(self.connections):
            connection.cut()

    def freeze(self, seconds: float) -> None:
        """Stop it, heartbeat and all."""
        self.world.note(self.name, f"stopped for {seconds:g}")
        for loop in self.loops:
            loop.frozen_until = max(loop.frozen_until, self.world.timeline.now + seconds)

    def thaw(self) -> None:
        if not self.has_crashed:
            for loop in self.loops:
                loop.frozen_until = 0.0

    def block(self, seconds: float) -> None:
        """Block its loop; the heartbeat goes on."""
        self.world.note(self.name, f"blocked for {seconds:g}")
        self.loop.frozen_until = max(self.loop.frozen_until, self.world.timeline.now + seconds)

    def drain(self) -> None:
        pass

    def exited(self) -> None:
        self.has_ended = True
        for connection in list(self.connections):
            connection.give_up(wires.BrokerUnavailable("exited"))
        for loop in self.loops:
            loop.frozen_until = float("inf")
        self.world.model.ended_process(self.name)

    def fault(self, error: BaseException) -> None:
        self.world.model.violation(f"{self.name} ended by {error!r}")

    def dispose(self) -> None:
        """At the very end; what asyncio keeps of a loop that was cut off shall keep nothing else alive."""
        self.connections.clear()
        for loop in self.loops:
            loop.frozen_until = 0.0
            loop.retire()
            self.world.model.faults += [f"{self.name}: {fault}" for fault in loop.faults]
        vars(self.mesh).clear()
        vars(self).clear()


class WorkerProcess(Process):
    """A program that runs one worker until it is told to stop."""

    def __init__(self, world: World, name: str, settings: WorkerSettings, kinds: tuple[str, ...]) -> None:
        super().__init__(world, name)
        self.tasks = tasks.register(self.mesh, self, kinds)
        self.worker: Worker | None = None
        self._settings = settings
        self._stop = asyncio.Event()
        self.is_draining = False
        self.main = self.begin(self._run())

    async def _run(self) -> None:
        try:
            async with self.mesh.worker(self._settings) as worker:
                self.worker = worker
                self.world.note(self.name, f"serves as {worker.worker.decode()}")
                await self._stop.wait()
                self.world.note(self.name, "drains")
            self.look_at_loops()
            self.world.note(self.name, "has stopped")
        except TaskmeshError as error:
            self.world.note(self.name, f"gives up: {error}")
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.fault(error)
        finally:
            if not self.has_ended:
                self.exited()

    def look_at_loops(self) -> None:
        """None of the worker's own loops may end by itself."""
        if self.worker is None:
            return
        for task in self.worker._background():
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.world.model.violation(f"{self.name}: {task.get_name()} died: {task.exception()!r}")

    def drain(self) -> None:
        if not self.is_draining and not self.has_ended:
            self.is_draining = True
            self.world.model.draining.add(self.name)
            self.loop.call_soon(self._stop.set)


class SimulatedHeartbeat:
    """Carries the lease in a loop of its own, as the thread does."""

    def __init__(
        self, kind: str, url: str, places: list[Place], ttl: float, host: Host, grace: float
    ) -> None:
        self._process: Process = asyncio.get_running_loop().process  # type: ignore[attr-defined]
        self._keeper = Keeper(url, places, ttl, host.name_in, host.offset_ms, host.heard)
        self._keeping: asyncio.Task[None] | None = None
        self._loop: VirtualLoop | None = None

    def start(self) -> None:
        self._loop = VirtualLoop(self._process.world.timeline, self._process)
        self._loop.frozen_until = self._process.loop.frozen_until
        self._process.loops.append(self._loop)
        self._keeping = self._loop.create_task(self._keeper.run())

    def end(self) -> None:
        if self._loop is not None and self._keeping is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._keeping.cancel)

    stop = end

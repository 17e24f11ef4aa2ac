"""Old and new programs side by side on one queue, as processes of two different files: nothing is lost.

Each test has the old file and the new one. Workers are processes; the test itself submits with one of the files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from taskmesh import Mesh, MeshSettings, ResultTimeout, TaskFailed, WorkerSettings
from taskmesh.codec import HEAD_BYTES, decode_message, version_of
from taskmesh.testing import wait_until
from tests.conftest import LIVENESS_TTL, MakeMesh

HEAD = """
import asyncio, dataclasses
from taskmesh import Mesh, WorkerSettings

mesh = Mesh("deploy")

async def serve() -> None:
    async with mesh.worker(WorkerSettings(misfit_patience=30)):
        print("ready", flush=True)
        await asyncio.Event().wait()

"""
TAIL = """
if __name__ == "__main__":
    asyncio.run(serve())
"""
PREFIX = "taskmesh:{deploy:default:0}:"
numbers = itertools.count()


class Programs:
    """Writes program files, runs them as workers, and loads them to submit with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def file(self, text: str) -> Path:
        path = self._folder / f"program_{next(numbers)}.py"
        path.write_text(HEAD + text + TAIL)
        return path

    def load(self, path: Path) -> ModuleType:
        """The program, for this process to submit with."""
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

    async def start(self, path: Path) -> subprocess.Popen[bytes]:
        """A worker process of that program; returns when it serves."""
        process = self._launch(path)
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        return process

    def _launch(self, path: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE)
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def programs(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    monkeypatch.setenv("TASKMESH_URL", redis_url)
    monkeypatch.setenv("TASKMESH_LIVENESS_TTL", str(LIVENESS_TTL))
    made = Programs(tmp_path)
    yield made
    made.end()


GREET_OLD = """
@mesh.task
async def greet(name: str) -> str:
    return f"old {name}"
"""
GREET_NEW = """
@mesh.task
async def greet(name: str, polite: bool = False) -> str:
    return f"new {name} {polite}"

@mesh.task
async def part(name: str) -> str:
    return f"bye {name}"
"""
WITHOUT_PARAMETER = """
@mesh.task
async def greet() -> str:
    return "nobody"
"""
BY_NUMBER = """
@mesh.task
async def greet(name: int) -> str:
    return f"number {name}"
"""
ITEM_OLD = """
@dataclasses.dataclass
class Item:
    name: str

@mesh.task
async def ship(item: Item) -> Item:
    return item
"""
ITEM_NEW = """
@dataclasses.dataclass
class Item:
    name: str
    weight: float = 1.5

@mesh.task
async def ship(item: Item) -> Item:
    return item
"""
DEFAULT_OLD = """
@mesh.task
async def page(number: int, size: int = 10) -> int:
    return size
"""
DEFAULT_NEW = DEFAULT_OLD.replace("10", "20")
BATCH_OLD = """
from taskmesh import Batch

@mesh.task(batch=Batch())
async def double(rows: list[int]) -> list[int]:
    return [2 * row for row in rows]
"""
BATCH_NEW = BATCH_OLD.replace("list[int]) -> list[int]", "list[int | str]) -> list[int]").replace(
    "2 * row", "2 * int(row)"
)


async def test_a_new_task_goes_to_new_workers_and_waits_until_there_is_one(
    programs: Programs, plain: redis.Redis
) -> None:
    old, new = programs.file(GREET_OLD), programs.file(GREET_NEW)
    producer = programs.load(new)
    await programs.start(old)
    async with producer.mesh:
        early = await producer.part.submit_many(f"early {n}" for n in range(20))
        await wait_until(lambda: plain.xlen(PREFIX + "parked") == 20)
        await programs.start(new)
        late = await producer.part.submit_many(f"late {n}" for n in range(20))
        results = [await handle.result(timeout=10) for handle in [*early, *late]]
    assert results == [f"bye {when} {n}" for when in ("early", "late") for n in range(20)]
    assert not plain.exists(PREFIX + "dead", PREFIX + "parked")


async def test_a_new_optional_argument_goes_to_new_workers_and_waits_until_there_is_one(
    programs: Programs, plain: redis.Redis
) -> None:
    old, new = programs.file(GREET_OLD), programs.file(GREET_NEW)
    producer = programs.load(new)
    await asyncio.gather(programs.start(old), programs.start(old))
    async with producer.mesh:
        before = await producer.greet.submit("Ada")  # what the old one takes, it runs
        assert await before.result(timeout=5) == "old Ada"
        early = await producer.greet.submit_many(producer.greet.bind("Bo", polite=True) for _ in range(20))
        await wait_until(lambda: misfits(plain) >= 2, what="the old worker has refused them more than once")
        await programs.start(new)  # the old ones go on: they give what they do not take to the one that does
        began = time.monotonic()
        late = await producer.greet.submit_many(producer.greet.bind("Cy", polite=True) for _ in range(20))
        results = [await handle.result(timeout=20) for handle in [*early, *late]]
        assert time.monotonic() - began < 5, "found by chance"
    assert results == ["new Bo True"] * 20 + ["new Cy True"] * 20
    assert not plain.exists(PREFIX + "dead", PREFIX + "delayed")


async def test_large_arguments_that_do_not_fit_yet_stay_beside_their_message(
    programs: Programs, plain: redis.Redis
) -> None:
    old, new = programs.file(GREET_OLD), programs.file(GREET_NEW)
    producer = programs.load(new)
    await programs.start(old)
    name = "x" * 1_500_000
    async with producer.mesh:
        handle = await producer.greet.submit(name, polite=True)
        await wait_until(lambda: misfits(plain) >= 1)
        await programs.start(new)
        assert await handle.result(timeout=20) == f"new {name} True"


@pytest.mark.parametrize("changed", [WITHOUT_PARAMETER, BY_NUMBER], ids=["removed parameter", "changed type"])
async def test_old_calls_that_a_new_worker_does_not_take_wait_for_an_old_one(
    programs: Programs, plain: redis.Redis, changed: str
) -> None:
    old, new = programs.file(GREET_OLD), programs.file(changed)
    producer = programs.load(old)
    await programs.start(new)
    async with producer.mesh:
        handles = await producer.greet.submit_many(["Ada", "Bo"])
        await wait_until(lambda: misfits(plain) >= 1)
        await programs.start(old)  # the deploy is rolled back, or had not reached this one
        assert [await handle.result(timeout=20) for handle in handles] == ["old Ada", "old Bo"]


async def test_rows_of_a_batch_that_do_not_fit_wait_and_those_beside_them_do_not(
    programs: Programs, plain: redis.Redis
) -> None:
    old, new = programs.file(BATCH_OLD), programs.file(BATCH_NEW)
    producer = programs.load(new)
    await programs.start(old)
    async with producer.mesh:
        one, two = await producer.double.submit_many([1, "2"])
        assert await one.result(timeout=5) == 2
        await wait_until(lambda: misfits(plain) >= 1)
        await programs.start(new)
        assert await two.result(timeout=20) == 4


@pytest.mark.parametrize("swapped", [False, True], ids=["new producer", "old producer"])
async def test_a_field_that_one_side_lacks_is_left_out_or_has_its_default(
    programs: Programs, swapped: bool
) -> None:
    old, new = programs.file(ITEM_OLD), programs.file(ITEM_NEW)
    producer, worker = (programs.load(old), new) if swapped else (programs.load(new), old)
    await programs.start(worker)
    async with producer.mesh:
        item = producer.Item("box")
        assert await (await producer.ship.submit(item)).result(timeout=5) == item


async def test_with_changed_defaults_each_worker_answers_with_its_own(programs: Programs) -> None:
    old, new = programs.file(DEFAULT_OLD), programs.file(DEFAULT_NEW)
    producer = programs.load(new)
    await asyncio.gather(programs.start(old), programs.start(new))
    async with producer.mesh:
        handles = await producer.page.submit_many(range(100))
        results = [await handle.result(timeout=10) for handle in handles]
    assert set(results) <= {10, 20}


async def test_a_removed_task_goes_to_the_old_workers_that_are_left_and_waits_for_one_after_that(
    programs: Programs, plain: redis.Redis
) -> None:
    with_part, without_part = programs.file(GREET_NEW), programs.file(GREET_OLD)
    producer = programs.load(with_part)
    leaving = await programs.start(with_part)
    await programs.start(without_part)
    async with producer.mesh:
        handles = await producer.part.submit_many(["Ada"] * 20)
        assert [await handle.result(timeout=10) for handle in handles] == ["bye Ada"] * 20
        leaving.terminate()
        await asyncio.to_thread(leaving.wait, 10)
        orphan = await producer.part.submit("Bo")
        await wait_until(lambda: plain.xlen(PREFIX + "parked") == 1, timeout=20)
        await programs.start(with_part)
        assert await orphan.result(timeout=10) == "bye Bo"


async def test_workers_that_leave_one_by_one_lose_nothing_on_the_way(programs: Programs) -> None:
    """A deploy as it goes: old producers and new ones, two old workers that are replaced by new ones."""
    old, new = programs.file(GREET_OLD), programs.file(GREET_NEW)
    old_producer, new_producer = programs.load(old), programs.load(new)
    leaving = [await programs.start(old) for _ in range(2)]
    async with old_producer.mesh, new_producer.mesh:
        handles: list[Any] = []
        for process in [*leaving, None]:
            handles += await old_producer.greet.submit_many(["Ada"] * 50)
            polite = new_producer.greet.bind("Bo", polite=True)
            handles += await new_producer.greet.submit_many([polite] * 50)
            handles += await new_producer.part.submit_many(["Cy"] * 50)
            if process is not None:
                await programs.start(new)
                process.terminate()
        results = [await handle.result(timeout=30) for handle in handles]
    for first in range(0, 450, 150):
        assert set(results[first : first + 50]) <= {"old Ada", "new Ada False"}
        assert results[first + 50 : first + 150] == ["new Bo True"] * 50 + ["bye Cy"] * 50


# what no version takes


async def test_arguments_that_no_version_takes_fail_in_the_end(
    make_mesh: MakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    producer, first, second = make_mesh(), make_mesh(), make_mesh()

    @producer.task(name="greet")
    async def greet(name: str) -> None: ...

    @first.task(name="greet")
    async def greet_number(name: int) -> None: ...

    @second.task(name="greet")
    async def greet_nobody() -> None: ...

    settings = WorkerSettings(misfit_patience=0.7)
    async with producer, first.worker(settings), second.worker(settings):
        handle = await greet.submit("Ada")
        with pytest.raises(TaskFailed, match="InvalidArguments"):
            await handle.result(timeout=10)
        (letter,) = await producer.dead_letters()
        assert letter.reason == "the call itself is wrong"
        assert letter.message is not None
        assert letter.message.args == ("Ada",)
    tries = [record for record in caplog.records if "another version" in record.getMessage()]
    assert 2 <= len(tries) <= 10, "bounded, and not handed to and fro"


async def test_what_waits_for_another_version_can_expire_and_be_cancelled(make_mesh: MakeMesh) -> None:
    producer, mesh = make_mesh(), make_mesh()

    @producer.task(name="greet")
    async def greet(name: str) -> None: ...

    @mesh.task(name="greet")
    async def greet_nobody() -> None: ...

    async with producer, mesh.worker():
        expiring = await greet.options(expires=0.3).submit("Ada")
        unwanted = await greet.submit("Bo")
        with pytest.raises(ResultTimeout):
            await unwanted.result(timeout=0.3)
        await unwanted.cancel()
        assert (await unwanted.outcome(timeout=5)).status == "cancelled"
        assert (await expiring.outcome(timeout=5)).status == "expired"


# wire versions


def of_version(data: bytes, version: int) -> bytes:
    return bytes([version]) + data[1:HEAD_BYTES] + b"whatever that version has here"


async def test_a_message_of_a_later_wire_version_waits_for_a_worker_that_reads_it(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh()

    @mesh.task
    async def work() -> None: ...

    async with mesh:
        await work.submit()
        stream = "taskmesh:{test:default:0}:tasks:normal"
        ((entry, fields),) = plain.xrange(stream)
        later = of_version(fields[b"message"], 9)
        plain.xdel(stream, entry)
        plain.xadd(stream, {"message": later})
        async with mesh.worker():
            await wait_until(lambda: plain.xlen("taskmesh:{test:default:0}:parked") == 1)
            (letter,) = await mesh.dead_letters()
            assert (letter.reason, letter.message, letter.raw) == ("no handler", None, later)
            partition = mesh.client.partition("default")
            joined = await partition.join(b"newer", ["work", "wire:1", "wire:9"])
            assert joined.released == 1
            # Whoever gets it now, it ends with the one that reads it.
            await wait_until(lambda: plain.xpending_range(stream, "workers", "-", "+", 10, "newer"))
            assert plain.xlen("taskmesh:{test:default:0}:dead") == 0


async def test_signed_messages_wait_where_the_workers_have_no_keys_yet(redis_url: str) -> None:
    keys = ("a key of sufficient length",)
    settings = MeshSettings(url=redis_url, liveness_ttl=LIVENESS_TTL)
    old = Mesh("signing", settings=settings)
    new = Mesh("signing", settings=dataclasses.replace(settings, signing_keys=keys))

    async def work(n: int) -> int:
        return n

    old.task(work)
    task = new.task(work)
    async with new, old.worker():
        handle = await task.submit(5)

        async def is_parked() -> bool:
            return [letter.reason for letter in await old.dead_letters()] == ["no handler"]

        await wait_until(is_parked)
        async with new.worker():
            assert await handle.result(timeout=10) == 5


def test_what_is_no_message_has_no_version() -> None:
    head = b"\x010" + b"a" * 20
    assert version_of(head) == 1
    assert version_of(b"\x09" + head[1:]) == 9
    for data in (
        b"",
        head[:-1],
        b"\x00" + head[1:],
        b"{" + head[1:],
        b"\x013" + head[2:],
        b"\x010" + b"\xff" * 20,
    ):
        assert version_of(data) is None


def misfits(plain: redis.Redis) -> int:
    """The most that any delayed message was refused so far."""
    return max((decode_message(data).misfits for data in plain.zrange(PREFIX + "delayed", 0, -1)), default=0)

"""Memory that a machine's processes share. Each ``HostMemory`` stands for a process: locks go by open files."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskmesh.training import host
from taskmesh.training.host import SHARED, Held, HostMemory

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared memory here")
SIZE = host.SMALLEST + 1000


def value(number: int) -> bytes:
    return bytes([number]) * SIZE


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class Machine:
    """Some processes of one name, and how often they have fetched."""

    def __init__(self) -> None:
        self.name = f"test {uuid.uuid4()}"
        self.fetches = 0

    def process(self) -> HostMemory:
        return HostMemory(self.name)

    def folders(self) -> list[Path]:
        return [path for path in SHARED.glob("taskmesh-*") if path == HostMemory(self.name)._folder]

    async def hold(self, process: HostMemory, number: int, pause: float = 0.0) -> Held:
        async def fill(into: memoryview) -> None:
            self.fetches += 1
            into[: SIZE // 2] = value(number)[: SIZE // 2]
            await asyncio.sleep(pause)
            into[:] = value(number)

        wanted = digest(value(number))
        held = await process.hold(wanted, SIZE, fill, lambda data: digest(bytes(data)) == wanted)
        assert held is not None
        assert held.data == value(number)
        return held


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    for path in machine.folders():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


async def test_what_one_has_fetched_the_others_need_not_fetch(machine: Machine) -> None:
    one, two, three = (machine.process() for _ in range(3))
    held = await asyncio.gather(*(machine.hold(each, 1, 0.05) for each in (one, two, three)))
    assert machine.fetches == 1
    await machine.hold(one, 2)
    assert machine.fetches == 2
    assert all(each.data == value(1) for each in held)


async def test_a_value_stays_until_it_is_released_however_many_come_after(machine: Machine) -> None:
    one, two = machine.process(), machine.process()
    held = await machine.hold(one, 1)
    for number in range(2, 10):
        (await machine.hold(two, number)).release()
        assert held.data == value(1)
    held.release()
    assert len([each for each in two._files[SIZE] if each.users]) == 0


async def test_files_that_are_all_in_use_leave_no_room(machine: Machine) -> None:
    one, two = machine.process(), machine.process()
    held = [await machine.hold(one, number) for number in range(host.FILES)]

    async def fill(into: memoryview) -> None:
        raise AssertionError("nothing is to be overwritten")

    assert await two.hold(digest(value(9)), SIZE, fill, lambda data: True) is None
    held[0].release()
    await machine.hold(two, 9)


async def test_who_writes_into_a_value_changes_it_for_itself_and_gets_the_next_one_whole(
    machine: Machine,
) -> None:
    one, two = machine.process(), machine.process()
    mine, theirs = await machine.hold(one, 1), await machine.hold(two, 1)
    mine.data[5000:6000] = bytes(1000)
    assert theirs.data == value(1)
    mine.release()
    theirs.release()
    for number in range(2, 2 + 2 * host.FILES):  # each file again
        (await machine.hold(two, number)).release()
        (await machine.hold(one, number)).release()  # looks at all of it


async def test_a_fetch_that_fails_leaves_the_file_to_the_next(machine: Machine) -> None:
    one, two = machine.process(), machine.process()

    async def fail(into: memoryview) -> None:
        into[:10] = b"half a one"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await one.hold(digest(value(1)), SIZE, fail, lambda data: True)
    await machine.hold(two, 1)
    await machine.hold(one, 1)
    assert machine.fetches == 1


async def test_an_offer_is_there_without_a_fetch_until_the_next(machine: Machine) -> None:
    master, worker = machine.process(), machine.process()
    for number in (1, 2, 3, 4, 5):
        await master.offer(digest(value(number)), memoryview(value(number)), lambda data: True)
        (await machine.hold(worker, number)).release()
    assert machine.fetches == 0


async def test_small_values_and_a_full_memory_do_without(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(into: memoryview) -> None:
        raise AssertionError

    assert await machine.process().hold(b"x" * 16, 1000, fill, lambda data: True) is None

    def full(*_: object) -> None:
        raise OSError(host.errno.ENOSPC, "no space")

    monkeypatch.setattr("taskmesh.training.host.os.posix_fallocate", full)
    process = machine.process()
    assert await process.hold(b"x" * 16, SIZE, fill, lambda data: True) is None
    assert await process.hold(b"y" * 16, SIZE, fill, lambda data: True) is None


PROGRAM = """
import asyncio, sys
from taskmesh.training.host import HostMemory
async def fill(into):
    into[:] = bytes([7]) * len(into)
async def main():
    memory = HostMemory(sys.argv[1])
    for number in range(int(sys.argv[3])):
        await memory.hold(bytes([number]) * 16, int(sys.argv[2]), fill, lambda data: True)
    print("held", flush=True)
    await asyncio.sleep(60 if sys.argv[4] == "wait" else 0)
asyncio.run(main())
"""


def start(machine: Machine, values: int, then: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", PROGRAM, machine.name, str(SIZE), str(values), then]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


async def test_a_process_that_is_killed_holds_nothing_any_more(machine: Machine) -> None:
    killed = start(machine, host.FILES, "wait")
    assert killed.stdout is not None
    assert await asyncio.to_thread(killed.stdout.readline) == b"held\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    await machine.hold(machine.process(), 1)


def test_the_last_to_end_leaves_nothing_behind(machine: Machine) -> None:
    lasting = start(machine, 1, "wait")
    assert lasting.stdout is not None
    assert lasting.stdout.readline() == b"held\n"
    assert start(machine, 2, "end").wait(30) == 0
    assert machine.folders(), "somebody still uses it"
    lasting.send_signal(signal.SIGKILL)
    lasting.wait()
    assert start(machine, 1, "end").wait(30) == 0
    assert not machine.folders()


async def test_one_that_leaves_while_nothing_is_held_does_not_break_the_others(machine: Machine) -> None:
    one, other = machine.process(), machine.process()
    for process in (one, other):
        (await machine.hold(process, 1)).release()
    del one, process
    gc.collect()
    assert not machine.folders()
    (await machine.hold(other, 2)).release()

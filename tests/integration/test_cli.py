"""The command line, as real processes against a real server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis

from taskmesh import Mesh
from taskmesh.testing import RedisServer, wait_until
from tests.integration.cli_support import (
    APP,
    Program,
    children,
    is_running,
    is_settled,
    old_server,
    resident_bytes,
    taskmesh,
)

MAX_IDLE_BYTES = 50 * 1024 * 1024
Start = Callable[..., Program]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.joinpath("shop.py").write_text(APP)
    return tmp_path


@pytest.fixture
def start(folder: Path, redis_url: str) -> Iterator[Start]:
    """Starts ``taskmesh`` with these arguments; what still runs at the end is killed."""
    started: list[Program] = []

    def begin(*arguments: str, url: str = redis_url) -> Program:
        program = Program(list(arguments), folder, url)
        started.append(program)
        return program

    yield begin
    for program in started:
        below = children(program.process.pid) if program.process.poll() is None else []
        program.close()
        for pid in below:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def shop(folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModuleType]:
    """The app's module in this process, its Mesh connected."""
    monkeypatch.setenv("TASKMESH_URL", redis_url)
    spec = importlib.util.spec_from_file_location("shop", folder / "shop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "shop", module)
    spec.loader.exec_module(module)
    mesh: Mesh = module.mesh
    async with mesh:
        yield module


# the worker


async def test_it_runs_tasks_and_drains_on_sigterm(
    start: Start, shop: ModuleType, plain: redis.Redis
) -> None:
    worker = start("worker", "shop:mesh", "-c", "4")
    await worker.says("serves default, mail")
    handles = await shop.work.submit_many([shop.work.bind(0.3) for _ in range(12)])
    await handles[0].result(timeout=20)
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ends() == 0
    started = 12 - int(plain.xlen("taskmesh:{shop:default:0}:tasks:normal"))
    assert 1 <= started <= 12
    # What it had not begun went back, and the next worker does it: nothing that was accepted is lost.
    after = start("worker", "shop:mesh")
    assert [await handle.result(timeout=20) for handle in handles] == ["done"] * 12
    after.process.send_signal(signal.SIGINT)
    assert await after.ends() == 0
    assert is_settled(plain)


async def test_a_second_signal_ends_it_at_once(start: Start, shop: ModuleType) -> None:
    worker = start("worker", "shop:mesh")
    await worker.says("serves")
    await shop.work.submit(60)
    await asyncio.sleep(0.2)
    worker.process.send_signal(signal.SIGTERM)
    await worker.says("draining")
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ends(2.0) == 1
    assert "Traceback" not in worker.text


async def test_a_second_signal_reaches_a_blocked_loop(
    start: Start, shop: ModuleType, plain: redis.Redis
) -> None:
    worker = start("worker", "shop:mesh")
    await worker.says("serves")
    await shop.block.submit(60)
    lane = "taskmesh:{shop:default:0}:tasks:normal"
    await wait_until(lambda: plain.xpending(lane, "workers")["pending"] == 1)
    await asyncio.sleep(0.2)
    worker.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.2)
    worker.process.send_signal(signal.SIGINT)
    assert await worker.ends(2.0) == 1


async def test_it_ends_in_time_when_the_server_is_gone(start: Start) -> None:
    with RedisServer() as server:
        worker = start("worker", "shop:mesh", "--drain-timeout", "1", url=server.url)
        await worker.says("serves")
        server.kill()
        await asyncio.sleep(0.5)
        worker.process.send_signal(signal.SIGTERM)
        await worker.ends(11.0)
        assert "Traceback" not in worker.text


async def test_a_signal_while_it_connects_ends_it(start: Start) -> None:
    with RedisServer() as server:
        server.pause()
        worker = start("worker", "shop:mesh", url=server.url)
        await wait_until(lambda: _handles_sigterm(worker.process.pid))
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ends(4.0) == 0
        server.resume()


def _handles_sigterm(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & 1 << signal.SIGTERM - 1)
    return False


async def test_an_idle_worker_is_small(start: Start, shop: ModuleType) -> None:
    worker = start("worker", "shop:mesh")
    await worker.says("serves")
    loaded = await (await shop.modules.submit()).result(timeout=10)
    assert not {"rich", "typer", "torch", "numpy", "pydantic"} & set(loaded)
    assert resident_bytes(worker.process.pid) < MAX_IDLE_BYTES


async def test_only_the_named_queues_are_served(start: Start, shop: ModuleType) -> None:
    worker = start("worker", "shop:mesh", "-q", "mail")
    await worker.says("serves mail\n")
    assert taskmesh(
        "worker", "shop:mesh", "-q", "male", folder=Path(shop.__file__ or "").parent, url=""
    ).stderr == ("taskmesh: no task of Mesh 'shop' is on queue 'male' (there are: default, mail)\n")


# several processes


async def test_a_dead_process_is_replaced(start: Start, shop: ModuleType) -> None:
    supervisor = start("worker", "shop:mesh", "--procs", "2")
    await supervisor.says("serves", times=2)
    before = set(children(supervisor.process.pid))
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    await supervisor.says("serves", times=3)
    after = set(children(supervisor.process.pid))
    assert len(after) == 2 and min(before) not in after
    assert await (await shop.add.submit(1, 2)).result(timeout=10) == 3
    supervisor.process.send_signal(signal.SIGTERM)
    assert await supervisor.ends() == 0
    assert not any(map(is_running, after))


async def test_the_supervisor_waits_for_the_drain(start: Start, shop: ModuleType) -> None:
    supervisor = start("worker", "shop:mesh", "--procs", "2")
    await supervisor.says("serves", times=2)
    handles = await shop.work.submit_many([shop.work.bind(1.0) for _ in range(8)])
    await asyncio.sleep(0.3)
    supervisor.process.send_signal(signal.SIGINT)
    assert await supervisor.ends() == 0
    assert [await handle.result(timeout=1) for handle in handles] == ["done"] * 8


async def test_a_second_signal_kills_the_processes(start: Start, shop: ModuleType) -> None:
    supervisor = start("worker", "shop:mesh", "--procs", "2")
    await supervisor.says("serves", times=2)
    pids = children(supervisor.process.pid)
    await shop.work.submit(60)
    await asyncio.sleep(0.2)
    supervisor.process.send_signal(signal.SIGTERM)
    await supervisor.says("draining")
    supervisor.process.send_signal(signal.SIGTERM)
    assert await supervisor.ends(3.0) == 1
    assert not any(map(is_running, pids))


async def test_processes_do_not_outlive_a_killed_supervisor(start: Start) -> None:
    supervisor = start("worker", "shop:mesh", "--procs", "2")
    await supervisor.says("serves", times=2)
    pids = children(supervisor.process.pid)
    supervisor.process.kill()
    await wait_until(lambda: not any(map(is_running, pids)))


async def test_what_cannot_work_is_not_tried_again(start: Start) -> None:
    supervisor = start("worker", "shop:nothing", "--procs", "2")
    assert await supervisor.ends() == 1
    assert "taskmesh: module 'shop' has no attribute 'nothing'\n" in supervisor.text
    assert "Traceback" not in supervisor.text


# what can be wrong


def _line(folder: Path, url: str, *arguments: str) -> str:
    """The one line on stderr of a command that fails with code 1."""
    done = taskmesh(*arguments, folder=folder, url=url)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("taskmesh: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("taskmesh: ").rstrip("\n")


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("shop", "'shop' names no object: write module:attribute, for example app:mesh"),
        ("shop:", "'shop:' names no object: write module:attribute, for example app:mesh"),
        ("nowhere:mesh", "there is no module 'nowhere' in "),
        ("shop:nothing", "module 'shop' has no attribute 'nothing'"),
        ("shop:not_a_mesh", "'shop:not_a_mesh' is not a Mesh but an int"),
        ("shop:add", "'shop:add' is not a Mesh but a Task"),
        ("broken:mesh", "importing 'broken' failed: ZeroDivisionError: division by zero (broken.py, line 1)"),
        ("unmade:mesh", "importing 'unmade' failed: it needs the module 'no_such_library'"),
        ("misnamed:mesh", "importing 'misnamed' failed: mesh name 'a b': use 1 to 100 letters"),
    ],
)
@pytest.mark.parametrize("command", ["worker", "queues"])
def test_a_bad_app(folder: Path, redis_url: str, command: str, app: str, said: str) -> None:
    folder.joinpath("broken.py").write_text("1 / 0\n")
    folder.joinpath("unmade.py").write_text("import no_such_library\n")
    folder.joinpath("misnamed.py").write_text("from taskmesh import Mesh\nmesh = Mesh('a b')\n")
    assert _line(folder, redis_url, command, app).startswith(said)


@pytest.mark.parametrize("command", ["worker", "queues"])
def test_a_server_that_is_not_there(folder: Path, command: str) -> None:
    assert _line(folder, "redis://127.0.0.1:1", command, "shop:mesh").startswith(
        "no answer from redis://127.0.0.1:1: "
    )


@pytest.mark.parametrize("command", ["worker", "queues"])
def test_a_bad_url(folder: Path, command: str) -> None:
    assert _line(folder, "http://:secret@somewhere", command, "shop:mesh").startswith(
        "Redis URL 'http://somewhere': "
    )


@pytest.mark.parametrize("command", ["worker", "queues"])
def test_a_server_that_is_too_old(folder: Path, command: str) -> None:
    with old_server("6.2.14") as url:
        line = _line(folder, url, command, "shop:mesh")
    assert line == f"{url} is Redis 6.2.14; taskmesh needs Redis 7.0 or newer"


@pytest.mark.parametrize("command", ["worker", "queues"])
def test_a_wrong_password(folder: Path, command: str) -> None:
    with RedisServer() as server:
        server.command("CONFIG", "SET", "requirepass", "right")
        for password in (":wrong@", ""):
            url = server.url.replace("127", f"{password}127")
            line = _line(folder, url, command, "shop:mesh")
            assert line.startswith(f"{server.url} refused the credentials: ")
            assert "wrong" not in line


def test_debug_shows_the_traceback(folder: Path, redis_url: str) -> None:
    for command in ("worker", "queues"):
        done = taskmesh("--debug", command, "nowhere:mesh", folder=folder, url=redis_url)
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("taskmesh: there is no module")


# looking


async def test_queues_and_workers_as_json(
    start: Start, shop: ModuleType, folder: Path, redis_url: str
) -> None:
    await shop.add.submit_many([shop.add.bind(1, 2) for _ in range(3)])
    await shop.add.submit_in(60, 1, 2)
    done = taskmesh("queues", "shop:mesh", "--json", folder=folder, url=redis_url)
    queues = {queue["name"]: queue for queue in json.loads(done.stdout)}
    assert set(queues) == {"default", "mail"}
    assert (queues["default"]["waiting"], queues["default"]["delayed"]) == (3, 1)
    assert queues["default"]["oldest_age"] >= 0
    assert queues["mail"]["oldest_age"] is None
    worker = start("worker", "shop:mesh")
    await worker.says("serves")
    done = taskmesh("workers", "shop:mesh", "--json", folder=folder, url=redis_url)
    (listed,) = json.loads(done.stdout)
    assert listed["is_alive"] and listed["queues"] == ["default", "mail"]
    assert str(worker.process.pid) in listed["name"]


async def test_queues_and_workers_as_tables(shop: ModuleType, folder: Path, redis_url: str) -> None:
    await shop.add.submit(1, 2)
    lines = taskmesh("queues", "shop:mesh", folder=folder, url=redis_url).stdout.splitlines()
    assert lines[0].split() == ["QUEUE", "WAITING", "PENDING", "DELAYED", "DEAD", "PARKED", "OLDEST"]
    assert lines[1].split()[:6] == ["default", "1", "0", "0", "0", "0"]
    assert taskmesh("workers", "shop:mesh", folder=folder, url=redis_url).stdout.startswith("WORKER")


async def test_dead_letters(start: Start, shop: ModuleType, folder: Path, redis_url: str) -> None:
    def run(*arguments: str) -> str:
        done = taskmesh("dead", *arguments, folder=folder, url=redis_url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def wait_for_dead(count: int) -> None:
        await wait_until(lambda: _count_dead(shop.mesh, count))

    worker = start("worker", "shop:mesh")
    await worker.says("serves")
    await shop.fail.submit_many([shop.fail.bind(f"number {index}") for index in range(4)])
    await wait_for_dead(4)
    table = run("list", "shop:mesh").splitlines()
    assert len(table) == 5 and "ValueError: number 0" in table[1] and "mail" in table[1]
    letters = json.loads(run("list", "shop:mesh", "--queue", "mail", "--json"))
    assert [letter["error"]["message"] for letter in letters] == [f"number {index}" for index in range(4)]
    assert "args" not in letters[0]
    assert run("discard", "shop:mesh", letters[0]["entry"]) == "discarded 1\n"
    assert len(json.loads(run("list", "shop:mesh", "--json"))) == 3
    assert run("requeue", "shop:mesh", letters[1]["entry"], letters[2]["entry"]) == "requeued 2\n"
    await wait_for_dead(3)  # they fail again
    worker.process.send_signal(signal.SIGTERM)
    await worker.ends()
    assert run("requeue", "shop:mesh", "--all") == "requeued 3\n"
    assert json.loads(run("list", "shop:mesh", "--json")) == []
    assert run("discard", "shop:mesh", "--all", "-q", "mail") == "discarded 0\n"
    assert _line(folder, redis_url, "dead", "discard", "shop:mesh") == (
        "name the dead letters by entry id, or say --all"
    )
    assert _line(folder, redis_url, "dead", "discard", "shop:mesh", "1-1") == (
        "there is no dead letter '1-1' in default, mail"
    )


async def _count_dead(mesh: Mesh, count: int) -> bool:
    return len(await mesh.dead_letters("mail")) == count


async def test_top_runs_until_ctrl_c(start: Start, plain: redis.Redis) -> None:
    pytest.importorskip("rich")
    before = len(plain.client_list())
    program = start("top", "shop:mesh", "--interval", "0.1")
    await wait_until(lambda: len(plain.client_list()) > before)
    await asyncio.sleep(0.5)
    program.process.send_signal(signal.SIGINT)
    assert await program.ends() == 0
    assert program.text == ""

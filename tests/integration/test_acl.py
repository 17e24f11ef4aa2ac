"""The users of docs/security.md: they can do what they are for and nothing else. The contract runs as one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import taskmesh
from taskmesh import BrokerRefused, Cancelled, Mesh, Retry
from taskmesh.monitoring.snapshot import snapshot
from taskmesh.testing import RedisServer, wait_until
from tests import acl
from tests.conftest import settings_for_tests

PACKAGE = Path(taskmesh.__file__).parent
# What no call in the source shows: forms of commands that are put together from parts.
PARTS = {"xreadgroup"}
# Of their own users (sentinels), only where a setting asks for it on a server that has it, or of the demo's server.
ELSEWHERE = {"sentinel|master", "waitaof", "scan", "pttl"}
WITH_SUBCOMMANDS = {"client", "cluster", "script", "xgroup", "xinfo", "sentinel"}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def shop(url: str) -> Mesh:
    mesh = Mesh("shop", settings=settings_for_tests(url, retry_for=1.0))

    @mesh.task
    async def add(a: int, b: int) -> int:
        return a + b

    @mesh.task
    async def same(data: bytes) -> bytes:
        return data

    @mesh.task(retry=Retry(attempts=2, delay=0.01))
    async def fail() -> None:
        raise ValueError("no")

    return mesh


def denials(server: RedisServer) -> list[str]:
    """What was refused to anybody since the last look."""
    with server.client() as client:
        rows = client.acl_log()
        client.acl_log_reset()
    return [f"{row['username']}: {row['object']} ({row['context']})" for row in rows]


async def use(mesh: Mesh) -> None:
    """Everything that a submitter does."""
    add, same, fail = (mesh.get_task(name) for name in ("add", "same", "fail"))
    assert [await h.result(timeout=10) for h in await add.submit_many([add.bind(n, 1) for n in range(300)])]
    assert await (await add.submit_in(0.05, 1, 2)).result(timeout=10) == 3
    assert await (await same.submit(b"x" * 200_000)).result(timeout=10) == b"x" * 200_000
    assert (await (await fail.submit()).outcome(timeout=10)).failure is not None
    assert await (await add.submit_in(60, 1, 2)).cancel() is Cancelled.CANCELLED
    assert await add.handle("x" * 20).cancel() is Cancelled.REQUESTED


async def test_one_user_does_everything(server: RedisServer) -> None:
    denials(server)
    async with shop(acl.url_as(server, "shop")) as mesh, mesh.worker():
        await use(mesh)
        await wait_until(lambda: mesh.dead_letters())
        [letter] = await mesh.dead_letters()
        assert await mesh.requeue(letter)
        await wait_until(lambda: mesh.dead_letters())
        [letter] = await mesh.dead_letters()
        assert await mesh.discard(letter)
        assert (await snapshot(mesh)).queues[0].name == "default"
    assert denials(server) == []


async def test_a_producer_and_a_worker_do_with_less(server: RedisServer) -> None:
    denials(server)
    working, mesh = shop(acl.url_as(server, "shop-worker")), shop(acl.url_as(server, "shop-producer"))
    async with working, working.worker(), mesh:
        await use(mesh)
        with pytest.raises(BrokerRefused, match="can't run this command"):
            async with mesh.worker():
                pass
    assert [line for line in denials(server) if not line.startswith("shop-producer: ")] == []
    assert acl.commands("shop-producer") | acl.commands("shop-worker") <= acl.commands("shop")


FORBIDDEN: list[tuple[str, ...]] = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
    ("SHUTDOWN",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "ID", "1"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LIST"),
    ("REPLICAOF", "NO", "ONE"),
    ("CLUSTER", "RESET"),
    ("MONITOR",),
    ("SUBSCRIBE", "news"),
    ("DUMP", "taskmesh:{shop:default:0}:dead"),
    ("GET", "secret"),
    ("GET", "taskmesh:{shop2:default:0}:result:x"),
    ("SET", "taskmesh:{shopping:default:0}:dead", "x"),
    ("SET", "taskmesh:shop:x", "x"),
    ("EVAL", "return redis.call('GET', 'secret')", "0"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
]


@pytest.mark.parametrize("name", ["shop", "shop-producer", "shop-worker"])
def test_nothing_else_is_allowed(server: RedisServer, name: str) -> None:
    server.command("SET", "secret", "of another application")
    with redis.Redis.from_url(acl.url_as(server, name)) as client:
        for command in FORBIDDEN:
            with pytest.raises(redis.ResponseError, match=r"(?i)permission|can't (run|access)"):
                client.execute_command(*command)
    assert server.command("GET", "secret") == b"of another application"


def _commands_of_the_source() -> set[str]:
    """Every command that a script or the package itself names."""
    found: set[str] = set()
    for script in (PACKAGE / "broker" / "scripts").glob("*.lua"):
        call = r"redis\.p?call\(\s*'([A-Z]+)'(?:,\s*'([A-Z]+)')?"
        found |= {_name(*match) for match in re.findall(call, script.read_text())}
    for module in PACKAGE.rglob("*.py"):
        if "testing" not in module.parts:
            # The first word of a tuple or of a call's arguments.
            call = r"[(,]\s*\"([A-Z]{3,})\"(?:, \"([A-Z]+)\")?"
            found |= {_name(*match) for match in re.findall(call, module.read_text())}
    return found


def _name(command: str, word: str) -> str:
    command = command.lower()
    return f"{command}|{word.lower()}" if command in WITH_SUBCOMMANDS and word else command


def test_the_user_may_run_exactly_the_commands_that_the_source_names(server: RedisServer) -> None:
    allowed = acl.commands("shop")
    named = {name for name in _commands_of_the_source() if _is_command(server, name)} | PARTS
    assert named - ELSEWHERE - allowed == set(), "docs/security.md lacks these"
    assert allowed - named == set(), "docs/security.md allows these for nothing"


def _is_command(server: RedisServer, name: str) -> bool:
    """Whether the server takes it in a user's rules."""
    try:
        server.command("ACL", "SETUSER", "trial", f"+{name}")
    except redis.ResponseError:
        return name in ELSEWHERE  # an older server than those that have it
    return True

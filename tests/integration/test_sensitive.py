"""Sensitive arguments: the handler gets them, and nobody gets to see them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

import msgspec
import pytest

from taskmesh import Batch, ConfigurationError, DeadLetter, InvalidArguments, Mesh, Priority, TaskFailed
from taskmesh.codec import encode_message
from taskmesh.messages import Entry, Message
from taskmesh.monitoring.snapshot import snapshot
from taskmesh.testing import wait_until
from taskmesh.worker.deliveries import Delivery
from tests.conftest import MakeMesh
from tests.integration.cli_support import taskmesh

SECRET = "hunter-2 'n' \"ü😀\" \\d\n& co"
PIN = 4711


@dataclasses.dataclass
class Card:
    number: str
    year: int


async def leak(mesh: Mesh, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Submit the task ``leaky``, let it fail; returns all that can be seen of that, and its handle's id."""
    handle = await mesh.submit("leaky", *args, **kwargs)
    with pytest.raises(TaskFailed) as raised:
        await handle.result(timeout=5)
    await wait_until(lambda: mesh.dead_letters())
    [letter] = await mesh.dead_letters()
    assert letter.message is not None
    assert (await handle.outcome()).failure == letter.failure
    shown = [raised.value, raised.value.traceback, *getattr(raised.value, "__notes__", [])]
    shown += [repr(letter), repr(letter.message), letter.failure, repr(handle), await snapshot(mesh)]
    return "\n".join(map(str, shown)), letter.entry


@pytest.mark.parametrize(
    "write",
    [
        lambda secret: f"cannot log in with {secret}",
        lambda secret: f"cannot log in with {secret!r}",
        lambda secret: json.dumps({"password": secret}),
        lambda secret: f"https://ada:{quote(secret, safe='')}@example.org",
        lambda secret: str({"password": secret, "list": [secret]}),
        lambda secret: secret * 3,
        lambda secret: repr(repr({"text": json.dumps([secret])})),
        lambda secret: repr(secret.encode()) + ascii(secret),
        lambda secret: "?" + urlencode({"q": secret}),
    ],
    ids=[
        "str",
        "repr",
        "json",
        "url",
        "in a dict",
        "again and again",
        "json in repr in repr",
        "bytes",
        "query",
    ],
)
async def test_its_text_is_taken_out_of_failures_and_logs(
    make_mesh: MakeMesh, caplog: pytest.LogCaptureFixture, write: Any
) -> None:
    mesh = make_mesh()

    @mesh.task(sensitive=("password",))
    async def leaky(name: str, password: str) -> None:
        try:
            raise KeyError(password)
        except KeyError as error:
            error.add_note(f"noted: {password}")
            raise ValueError(write(password), {"args": [password]}) from error

    with caplog.at_level("DEBUG"):
        async with mesh, mesh.worker():
            shown, _ = await leak(mesh, "ada", SECRET)
            assert "***" in shown
            assert "leaky" in shown, "the rest of the traceback is there"
    for text in (shown, caplog.text):
        assert "hunter-2" not in text
        assert SECRET not in text


async def test_numbers_short_texts_bytes_and_members(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task(sensitive=("pin", "card", "key", "letter", "flag"))
    async def leaky(pin: int, card: Card, key: bytes, *, letter: str, flag: bool) -> None:
        raise ValueError(
            f"{pin} {card.number} {card.year} {key!r} {key.hex()} letter={letter} {flag} 14711 xyz"
        )

    async with mesh, mesh.worker():
        shown, _ = await leak(mesh, PIN, Card("4000-1234", 2031), b"\x00key\xff", letter="x", flag=True)
    assert "*** *** *** b'***' *** letter=*** True 14711 xyz" in shown


async def test_the_exception_that_is_raised_again_has_no_secret(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task(sensitive=("password",), raises=(PermissionError,))
    async def leaky(password: str) -> None:
        raise PermissionError(13, f"no: {password}", [password, 7])

    async with mesh, mesh.worker():
        with pytest.raises(PermissionError) as raised:
            await (await leaky.submit(SECRET)).result(timeout=5)
    assert raised.value.errno == 13
    assert raised.value.strerror == "no: ***"
    assert "hunter-2" not in repr(raised.value.args)


async def test_a_secret_is_found_though_the_handler_changed_its_arguments(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task(sensitive=("login",))
    async def leaky(login: dict[str, str]) -> None:
        password = login.pop("password")
        raise ValueError(password)

    async with mesh, mesh.worker():
        shown, _ = await leak(mesh, {"password": SECRET})
    assert "hunter-2" not in shown


async def test_a_long_traceback_is_cut_behind_the_secret(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task(sensitive=("password",))
    async def leaky(password: str) -> None:
        raise ValueError("a" * 7_900 + (SECRET + " ") * 9000)

    async with mesh, mesh.worker():
        shown, _ = await leak(mesh, SECRET)
    assert "hunter" not in shown
    assert "characters left out" in shown


async def test_large_arguments_and_batches(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    large = SECRET * 10_000

    @mesh.task(sensitive=("rows",), batch=Batch(max_rows=4))
    async def leaky(rows: list[str]) -> list[int]:
        raise ValueError(f"could not use {rows}")

    async with mesh, mesh.worker():
        shown, _ = await leak(mesh, large)
    assert "hunter" not in shown
    assert "could not use ['***']" in shown


async def test_arguments_that_do_not_fit_say_nothing_of_the_value(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task(sensitive=("level",))
    async def leaky(level: Literal["low", "high"], name: str) -> None: ...

    async with mesh:
        with pytest.raises(InvalidArguments) as raised:
            await leaky.submit(SECRET, "ada")  # type: ignore[arg-type]
    assert str(raised.value) == "task 'leaky': argument 'level': its value does not fit the annotation"


def test_nothing_that_holds_arguments_shows_them(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task(sensitive=("password",))
    async def leaky(password: str) -> None: ...

    message = Message("a" * 20, "leaky", (SECRET,), {"password": SECRET})
    data = encode_message(message)
    delivery = Delivery(None, Priority.HIGH, b"1-1", data, message, leaky.definition, 1, 1, 0.0)  # type: ignore[arg-type]
    letter = DeadLetter("1-1", "default", "failed", message, data, 1, "worker", None, 0)
    for shown in (
        leaky.bind(SECRET),
        message,
        Entry(Priority.HIGH, b"1-1", data, 1),
        delivery,
        letter,
        leaky,
    ):
        assert "hunter" not in f"{shown!r} {shown}"


@pytest.mark.parametrize("name", ["passwort", "ctx"])
def test_names_must_be_parameters(make_mesh: MakeMesh, name: str) -> None:
    mesh = make_mesh()

    async def leaky(user: str, password: str) -> None: ...

    with pytest.raises(ConfigurationError) as raised:
        mesh.task(sensitive=(name,))(leaky)
    assert str(raised.value) == (
        f"task 'leaky': sensitive names {name!r}, which is no parameter (there are: user, password)"
    )
    with pytest.raises(ConfigurationError, match="write a tuple of parameter names"):
        mesh.task(sensitive="password")(leaky)  # type: ignore[call-overload]


APP = """
from taskmesh import Mesh

mesh = Mesh("test")

@mesh.task(SENSITIVE)
async def leaky(name: str, password: str) -> None:
    raise ValueError(f"{name}: {password}")
"""


async def test_the_command_line_shows_everything_else(
    make_mesh: MakeMesh, redis_url: str, tmp_path: Path
) -> None:
    """Also where the failure is older than the word that the argument is sensitive."""
    mesh = make_mesh()

    @mesh.task
    async def leaky(name: str, password: str) -> None:
        raise ValueError(f"{name}: {password}")

    async with mesh, mesh.worker():
        _, entry = await leak(mesh, "ada", SECRET)
    (tmp_path / "vault.py").write_text(APP.replace("SENSITIVE", 'sensitive=("password",)'))
    (tmp_path / "other.py").write_text(
        "from taskmesh import Mesh\nmesh = Mesh('test')\n@mesh.task\ndef f(): ...\n"
    )

    def run(*arguments: str) -> str:
        done = taskmesh("dead", *arguments, folder=tmp_path, url=redis_url)
        assert done.returncode == 0, done.stderr
        assert "hunter-2" not in done.stdout + done.stderr
        return str(done.stdout)

    assert "ValueError: ada: ***" in run("list", "vault:mesh")
    assert "ada: ***" in run("list", "vault:mesh", "--json")
    shown = run("show", "vault:mesh", entry)
    assert "  name = 'ada'\n  password = ***\n" in shown
    assert "ValueError: ada: ***" in shown
    assert "traceback\n  Traceback" in shown
    record = msgspec.json.decode(run("show", "vault:mesh", entry, "--json"))
    assert record["arguments"] == {"name": "'ada'", "password": "***"}
    assert record["task"] == "leaky"
    done = taskmesh("dead", "show", "other:mesh", entry, folder=tmp_path, url=redis_url)
    assert "(not shown: this Mesh has no task 'leaky', and cannot tell which are sensitive)" in done.stdout

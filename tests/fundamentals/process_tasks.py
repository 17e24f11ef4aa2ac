"""Tasks that run in processes; the tests and the processes import them from here."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from taskmesh import Batch, Call, Context, Mesh, Next, Retry

mesh = Mesh("test")


class Declined(Exception):
    pass


async def middleware(call: Call, call_next: Next) -> Any:
    if call.task.name == "seen_by_middleware":
        call.args = (f"{call.args[0]} in {os.getpid()}",)
    return await call_next(call)


mesh.middleware.append(middleware)


@mesh.task(process=True)
def pid(seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return os.getpid()


@mesh.task(process=True)
def where(ctx: Context, seconds: float) -> str:
    time.sleep(seconds)
    return ctx.worker


@mesh.task(process=True)
def count_to(n: int) -> int:
    k = 0
    while k < n:
        k += 1
    return os.getpid()


@mesh.task(process=True)
def seen_by_middleware(text: str) -> str:
    return f"{text} {threading.active_count() > 0}"


@mesh.task(process=True)
def fails(cents: int) -> None:
    raise ValueError(f"no {cents}")


@mesh.task(process=True, raises=(Declined,))
def declines(cents: int) -> None:
    raise Declined("card", cents)


@mesh.task(process=True, sensitive=("password",))
def leaks(password: str) -> None:
    raise ValueError(f"wrong: {password}")


@mesh.task(process=True, retry=Retry(attempts=3, delay=0.0))
def flaky(ctx: Context) -> int:
    if ctx.attempt < 3:
        raise OSError("not yet")
    return ctx.attempt


@mesh.task(process=True)
def asks_again(ctx: Context) -> None:
    ctx.retry(0.0)


@mesh.task(process=True)
def exits() -> None:
    sys.exit("enough")


@mesh.task(process=True)
def returns_nonsense() -> object:
    return object()


@mesh.task(process=True)
def size(data: bytes) -> bytes:
    return data * 2


@mesh.task
async def plain(n: int) -> int:
    return n


@mesh.task(process=True)
async def submits(ctx: Context, n: int) -> tuple[int, str, int]:
    await asyncio.sleep(0.01)
    handle = await plain.submit(n)
    return await handle.result(timeout=5), ctx.worker, os.getpid()


@mesh.task(process=True, timeout=0.3)
def slow(marks: str) -> None:
    mark(marks)
    time.sleep(60)


@mesh.task(process=True)
def endless(marks: str) -> None:
    """It starts a program as well, and then gives the interpreter lock to nobody."""
    child = subprocess.Popen(["sleep", "600"])
    mark(marks, child.pid)
    re.match("(a+)+$", "a" * 60 + "b")


@mesh.task(process=True)
def dies(marks: str, how: str) -> None:
    mark(marks)
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


@mesh.task(process=True)
def dies_once(marks: str) -> int:
    mark(marks)
    if len(marked(marks)) == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return os.getpid()


@mesh.task(process=True)
def forks() -> int | None:
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    fork.start()
    fork.terminate()
    fork.join(5)
    return fork.exitcode


@mesh.task(process=True, queue="heavy")
def heavy(seconds: float) -> None:
    time.sleep(seconds)


@mesh.task(queue="rows", batch=Batch(max_rows=10, max_wait=0.01))
async def rows(items: list[int]) -> list[int]:
    return [item * 2 for item in items]


def mark(path: str, *more: int) -> None:
    """Note this process, and others, in a file."""
    with Path(path).open("a") as file:
        file.write(" ".join(map(str, [os.getpid(), *more])) + "\n")


def marked(path: str | Path) -> list[list[int]]:
    """What was noted: a list of process ids for each mark."""
    if not Path(path).exists():
        return []
    return [[int(word) for word in line.split()] for line in Path(path).read_text().splitlines()]

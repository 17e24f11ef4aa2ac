"""Starts the server of one data folder, and stops it after its last user. A program of its own.

``embedded.py`` runs it by path, with the standard library alone: it is up in milliseconds, and it may fork
because it has one thread. The *launcher* is the caller's child until the server answers. The *guard*,
forked from a launcher, is detached, one a folder, and waits for the last user to end.

    users.lock   shared     by each process that uses the server (the caller opens it, the launcher locks it)
    start.lock   exclusive  by whoever starts or stops
    guard.lock   exclusive  by the guard, for as long as it lives
    server.lock  exclusive  by the server, which inherits the descriptor; the file says "pid, mode, socket",
                            written by the process that becomes the server, void while it is not locked

``users`` is taken before ``start``, and the other two under ``start`` without waiting. The kernel gives up
the locks of a process however it ends, so no state can be stale. ``flock`` has to work there: a local disk.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

USERS, START, GUARD, SERVER, LOG = "users.lock", "start.lock", "guard.lock", "server.lock", "server.log"

SILENCE_S = 30.0  # without any answer, -LOADING included, a start has failed
TERM_S = 20.0  # for SIGTERM to do its work: the last flush of the AOF
KILL_S = 5.0
POLL_S = 0.01
LOG_LIMIT_BYTES = 1 << 20
TAIL_LINES = 12
# Large values come and go with every step of a training run. Memory that jemalloc gives back to the system at once has
# to be filled with zeros again for the next one: most of such a server's time. Under both names that builds go by.
_KEEP = "dirty_decay_ms:60000,muzzy_decay_ms:60000"
ALLOCATOR = {"MALLOC_CONF": _KEEP, "JE_MALLOC_CONF": _KEEP}


class StartError(Exception):
    """The server did not start; the message is for the user."""


class Running(NamedTuple):
    pid: int
    mode: str
    socket: str


def open_lock(path: Path) -> int:
    """A descriptor of the lock file, closed on exec. Files of another user are refused by their mode."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(fd: int) -> bool:
    """Take the lock exclusively unless another holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_server(fd: int) -> Running | None:
    """Who holds server.lock; None until the new server has written it."""
    lines = os.fsdecode(os.pread(fd, 4096, 0)).split("\n", 2)
    if len(lines) < 3 or not lines[2].endswith("\n"):
        return None
    return Running(int(lines[0]), lines[1], lines[2][:-1])


def ping(socket_path: str) -> str:
    """The first line of the answer to PING; empty when there is none within a second."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(socket_path)
            connection.sendall(b"PING\r\n")
            return connection.recv(128).decode("latin-1").strip()
    except OSError:
        return ""


def arguments(folder: Path, socket_path: str, mode: str) -> list[str]:
    """The server's command line: no TCP port, no snapshots, never a key evicted."""
    settings = {
        "port": "0",
        "unixsocket": socket_path,
        "unixsocketperm": "700",
        "dir": str(folder),
        "logfile": str(folder / LOG),
        "daemonize": "no",
        "save": "",
        "appendonly": "yes" if mode == "aof" else "no",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
    }
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


# --- the launcher


def spawn_server(binary: str, words: Sequence[str], lock: int, log: int, line: str) -> None:
    """Fork the server into a session of its own; it holds ``lock`` from its first instruction."""
    if os.fork():
        return
    stderr = os.dup(2)  # the log may be on the full disk that is the reason
    try:
        detach(log)
        os.set_inheritable(lock, True)
        os.pwrite(lock, os.fsencode(f"{os.getpid()}\n{line}\n"), 0)
        os.execve(binary, [binary, *words], {**os.environ, **ALLOCATOR})
    except OSError as error:
        os.write(stderr, os.fsencode(f"{error}\n"))
    finally:
        os._exit(127)


def detach(log: int) -> None:
    os.setsid()  # a SIGINT or SIGHUP of the caller's terminal stays there
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def ensure_guard(folder: Path, log: int) -> None:
    """Have a guard before there is a server, so that a launcher killed on its way leaves none unguarded."""
    guard = open_lock(folder / GUARD)
    if try_lock(guard) and os.fork() == 0:
        run_guard(folder, guard, log)
    os.close(guard)


def await_answer(lock: Path) -> Running | None:
    """The server once it answers PING; None when it ended instead. Call it under start.lock.

    A server that reads its AOF answers -LOADING, which shows that it gets on: the caller bounds that wait.
    """
    deadline = time.monotonic() + SILENCE_S
    running = None
    while time.monotonic() < deadline:
        fd = open_lock(lock)
        try:
            if try_lock(fd):
                return None
            running = read_server(fd)
        finally:
            os.close(fd)
        answer = ping(running.socket) if running else ""
        if answer.startswith("-LOADING"):
            deadline = time.monotonic() + SILENCE_S
        elif running and answer:
            return running
        time.sleep(POLL_S)
    if running is None:
        raise StartError(f"{lock} is held, by a server that does not end or by another program")
    raise StartError(f"process {running.pid} holds {lock}, but does not answer at {running.socket}")


def ensure_server(folder: Path, binary: str, mode: str, socket_path: str, log: int) -> Running:
    """The folder's running server, started unless there is one. Call it under start.lock."""
    if running := await_answer(folder / SERVER):
        return running
    lock = open_lock(folder / SERVER)
    if not try_lock(lock):
        raise StartError(f"{folder / SERVER} was taken by a program that does not hold {START}")
    os.ftruncate(lock, 0)  # what an earlier server wrote is not to be read as this one's
    if os.fstat(log).st_size > LOG_LIMIT_BYTES:
        os.ftruncate(log, 0)
    begin = os.fstat(log).st_size
    spawn_server(binary, arguments(folder, socket_path, mode), lock, log, f"{mode}\n{socket_path}")
    os.close(lock)
    if running := await_answer(folder / SERVER):
        return running
    written = (folder / LOG).read_bytes()[begin:].decode("utf-8", "replace").splitlines()
    tail = "\n".join(written[-TAIL_LINES:]) or "(it wrote nothing)"
    raise StartError(f"{binary} ended while it started in {folder}; the end of {LOG}:\n{tail}")


def launch(folder: Path, socket_path: str, mode: str, binary: str, users: int) -> Running:
    """Lock the caller's share of users.lock, and return the server once it answers.

    Until this program ends it has the share too: when the caller is killed on the way, the start is completed
    and then the guard stops the server.
    """
    fcntl.flock(users, fcntl.LOCK_SH)  # waits while a guard stops the server
    start = open_lock(folder / START)
    fcntl.flock(start, fcntl.LOCK_EX)
    log = os.open(folder / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    ensure_guard(folder, log)
    running = ensure_server(folder, binary, mode, socket_path, log)
    if running.mode != mode:
        raise StartError(f"the server of {folder} runs as {running.mode!r}, and {mode!r} was asked for")
    return running


# --- the guard


def run_guard(folder: Path, guard: int, log: int) -> NoReturn:
    """Wait for the last user to end, stop the server, end.

    Every file is opened at once: the folder may have been deleted or made anew when the wait is over.
    """
    try:
        detach(log)
        os.closerange(3, guard)  # the launcher's descriptors: a share of users.lock, and start.lock
        os.closerange(guard + 1, max(256, guard + 2))
        users, start, server = (open_lock(folder / name) for name in (USERS, START, SERVER))
        fcntl.flock(users, fcntl.LOCK_EX)
        fcntl.flock(start, fcntl.LOCK_EX)
        last = read_server(server)
        stop_server(server)
        if last is not None:
            Path(last.socket).unlink(missing_ok=True)  # a server that was killed has left it
        # In this order: whoever gets start.lock next must not find a guard that will not act again.
        for fd in (server, guard, start, users):
            os.close(fd)
    finally:
        os._exit(0)


def stop_server(lock: int) -> None:
    """Have the holder of server.lock end: by SIGTERM, in the end by SIGKILL. Call it under start.lock."""
    running = None
    for sign, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        deadline, sent = time.monotonic() + wait_s, False
        while time.monotonic() < deadline:
            if try_lock(lock):
                return
            running = running or read_server(lock)
            if not sent and running and has_open(running.pid, lock):
                os.kill(running.pid, sign)
                os.ftruncate(
                    lock, 0
                )  # should this guard be killed now, no launcher takes it for a server to join
                sent = True
            time.sleep(POLL_S)


def has_open(pid: int, fd: int) -> bool:
    """Whether that process has this file open: in another container the number names another process.

    True where there is no /proc to ask.
    """
    if not Path("/proc/self/fd").is_dir():
        return True
    wanted = os.fstat(fd)
    try:
        return any(same_file(entry, wanted) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def same_file(path: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), wanted)
    except OSError:
        return False


def main(words: Sequence[str]) -> int:
    """``FOLDER SOCKET aof|memory BINARY USERS_FD``: prints the server's socket, or the reason on stderr."""
    folder, socket_path, mode, binary, users = words
    os.set_inheritable(int(users), False)  # a server that inherited the share would never be without a user
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a caller's blocked SIGTERM would pass on to the server
    os.umask(0o077)
    try:
        running = launch(Path(folder), socket_path, mode, binary, int(users))
    except (StartError, OSError) as error:
        os.write(2, os.fsencode(str(error)))
        return 1
    os.write(1, os.fsencode(running.socket))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

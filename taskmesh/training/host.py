"""Memory that a machine's processes share: what one of them has, the others need not fetch.

A value lies in one of a few files in shared memory, found by its digest. Who lacks one takes the machine's lock, looks
once more, and fills a file that nobody uses; the others wait for that. Locks are flock's: they go with the process that
held them, whatever becomes of it. A file's head names its value only while it is whole.

Files stay mapped for as long as a process lives: to map one anew costs as much as to fetch it. They are mapped
privately, so a process that writes into a value changes it for itself alone. Such pages would keep what was written
when the file gets its next value; whoever takes one looks at all of it, and maps the file anew if it is not what it
should be.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from taskmesh.keys import RunKeys

SHARED = Path("/dev/shm")
FILES = 3  # one that is worked at, one that is being filled, one for those who are late
HEAD = 4096  # a page, so that values begin at one
SMALLEST = 256 * 1024  # bytes for which it is worth it
LOOK_EVERY = 0.001
ABANDONED_AFTER = 60.0
Fill = Callable[[memoryview], Awaitable[object]]
Check = Callable[[memoryview], bool]
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EACCES, errno.EROFS, errno.EPERM)


class Held(NamedTuple):
    """A value in memory, which stays what it is until ``release``."""

    data: memoryview
    release: Callable[[], None]


class _File:
    """One file, in this process."""

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.users = 0
        self._own: memoryview | None = None
        self._shared: memoryview | None = None

    def lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def holds(self, digest: bytes) -> bool:
        return os.pread(self.fd, len(digest), 0) == digest

    def name(self, digest: bytes) -> None:
        os.pwrite(self.fd, digest, 0)

    def own(self, check: Check) -> memoryview:
        """Its value, as this process's own once it is written to."""
        if self._own is None or not check(self._own):
            self._own = memoryview(mmap.mmap(self.fd, HEAD + self._size, access=mmap.ACCESS_COPY))[HEAD:]
        return self._own

    def shared(self) -> memoryview:
        """Its value, to be written."""
        if self._shared is None:
            os.posix_fallocate(
                self.fd, 0, HEAD + self._size
            )  # to write beyond what there is would end the process
            self._shared = memoryview(mmap.mmap(self.fd, HEAD + self._size))[HEAD:]
        return self._shared


class HostMemory:
    """The shared memory of those who go by one name on this machine, and belong to one user."""

    def __init__(self, name: str) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._folder = SHARED / f"taskmesh-{os.getuid()}-{digest}"
        self._usable = SHARED.is_dir()
        self._files: dict[int, list[_File]] = {}  # by the size of their values
        self._offered: Held | None = None
        weakref.finalize(self, _leave, self._folder, self._files)

    async def hold(self, digest: bytes, size: int, fill: Fill | None, check: Check) -> Held | None:
        """A value, by its digest. None when there is no room for it.

        Args:
            fill: brings it where nobody on this machine has; None to do without it then.
            check: whether memory holds it.

        Raises:
            Exception: what ``fill`` raises.
        """
        if not self._usable or size < SMALLEST:
            return None
        try:
            files = self._open(size)
            found = self._find(files, digest, check)
            if found is not None or fill is None:
                return found
            async with self._alone():
                return self._find(files, digest, check) or await self._bring(files, digest, fill, check)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._usable = False
            return None

    async def offer(self, digest: bytes, value: memoryview, check: Check) -> None:
        """Let the others on this machine have a value, until the next one is offered."""

        async def copy(into: memoryview) -> None:
            await asyncio.to_thread(np.copyto, np.frombuffer(into, np.uint8), np.frombuffer(value, np.uint8))

        held = await self.hold(digest, len(value), copy, check)
        before, self._offered = self._offered, held
        if before is not None:
            before.release()

    def _open(self, size: int) -> list[_File]:
        if size not in self._files:
            if not self._folder.exists():
                _sweep()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._files[size] = [_File(self._folder / f"{size}-{number}", size) for number in range(FILES)]
        return self._files[size]

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Be the only one on this machine who brings values."""
        self._folder.mkdir(mode=0o700, exist_ok=True)  # who left last may have removed it
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _try_lock(lock):  # noqa: ASYNC110 (nothing tells when it is free)
                await asyncio.sleep(LOOK_EVERY)
            yield
        finally:
            os.close(lock)

    def _find(self, files: list[_File], digest: bytes, check: Check) -> Held | None:
        for file in files:
            if file.users:
                if file.holds(digest):
                    return self._take(file, check)
            elif file.lock(fcntl.LOCK_SH):
                if file.holds(digest):
                    return self._take(file, check)
                file.unlock()
        return None

    async def _bring(self, files: list[_File], digest: bytes, fill: Fill, check: Check) -> Held | None:
        for file in files:
            if file.users or not file.lock(fcntl.LOCK_EX):
                continue
            file.users += 1  # nobody in this process takes it meanwhile
            try:
                into = file.shared()
                file.name(bytes(len(digest)))
                await fill(into)
                file.name(digest)
                file.lock(fcntl.LOCK_SH)
                return self._take(file, check)
            except BaseException:
                file.unlock()
                raise
            finally:
                file.users -= 1
        return None

    def _take(self, file: _File, check: Check) -> Held:
        data = file.own(check)
        file.users += 1

        def release() -> None:
            file.users -= 1
            if not file.users:
                file.unlock()

        return Held(data, release)


def host_name(url: str | None, keys: RunKeys) -> str:
    """By what the processes of a run go here."""
    return f"{url} {keys.tag!r}"


def _sweep() -> None:
    """Remove what nobody uses any more: whoever used it last was killed."""
    for folder in SHARED.glob(f"taskmesh-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER:
                _remove_unused(folder)


def _leave(folder: Path, files: dict[int, list[_File]]) -> None:
    """Leave nothing behind, unless others use it. At the end of the process at the latest."""
    for file in (file for each in files.values() for file in each):
        file.unlock()  # the mapping holds on to the file as long as a model lies in it
        os.close(file.fd)
    if files:
        with contextlib.suppress(OSError):
            _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    files = [os.open(path, os.O_RDWR) for path in folder.iterdir()]
    try:
        if all(map(_try_lock, files)):
            shutil.rmtree(folder)
    finally:
        for file in files:
            os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

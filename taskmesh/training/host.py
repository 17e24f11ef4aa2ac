"""Memory that a machine's workers share: what one of them has fetched, the others need not fetch.

A value lies in one of a few files in shared memory, found by its digest. Who lacks one takes the machine's lock, looks
once more, and fills a file that nobody uses; the others wait for that. Locks are flock's: they go with the process that
held them, whatever becomes of it. A file's head names its value only while it is whole.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

SHARED = Path("/dev/shm")
FILES = 3  # one that is worked at, one that is being filled, one for those who are late
HEAD = 4096  # a page, so that values begin at one
SMALLEST = 256 * 1024  # bytes for which it is worth it
LOOK_EVERY = 0.001
ABANDONED_AFTER = 60.0
Fill = Callable[[memoryview], Awaitable[object]]


class Held(NamedTuple):
    """A value in memory, which stays what it is until ``release``."""

    data: memoryview
    release: Callable[[], None]


class HostMemory:
    """The shared memory of those who go by one name on this machine, and belong to one user."""

    def __init__(self, name: str) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._folder = SHARED / f"taskmesh-{os.getuid()}-{digest}"
        self._usable = SHARED.is_dir()
        self._held: set[int] = set()
        weakref.finalize(self, _leave, self._folder, self._held)

    async def hold(self, digest: bytes, size: int, fill: Fill) -> Held | None:
        """A value, by its digest; ``fill`` brings it where nobody on this machine has. None when there is no room.

        Raises:
            Exception: what ``fill`` raises.
        """
        if not self._usable or size < SMALLEST:
            return None
        try:
            if not self._folder.exists():
                _sweep()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            found = self._find(digest, size)
            if found is not None:
                return found
            async with self._alone():
                return self._find(digest, size) or await self._bring(digest, size, fill)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EACCES, errno.EROFS, errno.EPERM):
                raise
            self._usable = False
            return None

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Be the only one on this machine who brings values."""
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _lock(lock, fcntl.LOCK_EX):  # noqa: ASYNC110 (nothing tells when it is free)
                await asyncio.sleep(LOOK_EVERY)
            yield
        finally:
            os.close(lock)

    def _files(self) -> Iterator[int]:
        for number in range(FILES):
            yield os.open(self._folder / str(number), os.O_RDWR | os.O_CREAT, 0o600)

    def _find(self, digest: bytes, size: int) -> Held | None:
        for file in self._files():
            if _lock(file, fcntl.LOCK_SH) and _holds(file, digest, size):
                return self._map(file, size)
            os.close(file)
        return None

    def _map(self, file: int, size: int) -> Held:
        """The value as memory of one's own once it is written to: nobody's mistakes are others' parameters."""
        whole = mmap.mmap(file, HEAD + size, access=mmap.ACCESS_COPY)
        self._held.add(file)

        def release() -> None:
            self._held.discard(file)
            _let_go(file)

        return Held(memoryview(whole)[HEAD:], release)

    async def _bring(self, digest: bytes, size: int, fill: Fill) -> Held | None:
        for file in self._files():
            if not _lock(file, fcntl.LOCK_EX):
                os.close(file)
                continue
            try:
                os.posix_fallocate(file, 0, HEAD + size)  # writing beyond what there is would end the process
                os.ftruncate(file, HEAD + size)
                os.pwrite(file, bytes(len(digest)), 0)
                # Not closed here: the thread that read the last piece may hold on to its view for a moment more.
                await fill(memoryview(mmap.mmap(file, HEAD + size))[HEAD:])
                os.pwrite(file, digest, 0)
            except BaseException:
                os.close(file)
                raise
            fcntl.flock(file, fcntl.LOCK_SH)
            return self._map(file, size)
        return None


def _sweep() -> None:
    """Remove what nobody uses any more: whoever used it last was killed."""
    for folder in SHARED.glob(f"taskmesh-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER:
                _remove_unused(folder)


def _let_go(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # the mapping holds on to the file as long as a model lies in it
    os.close(file)


def _leave(folder: Path, held: set[int]) -> None:
    """Leave nothing behind, unless others use it. At the end of the process at the latest."""
    for file in held:
        _let_go(file)
    held.clear()
    with contextlib.suppress(OSError):
        _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    files = [os.open(path, os.O_RDWR) for path in folder.iterdir()]
    try:
        if all(_lock(file, fcntl.LOCK_EX) for file in files):
            shutil.rmtree(folder)
    finally:
        for file in files:
            os.close(file)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holds(file: int, digest: bytes, size: int) -> bool:
    return os.pread(file, len(digest), 0) == digest and os.fstat(file).st_size == HEAD + size

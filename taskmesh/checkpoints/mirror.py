"""Checkpoints outside Redis: on whatever fsspec reaches (a folder, S3, ...). Calls block; they belong in a thread.

One folder a version, ``<mesh>/<run>/<version>-<token>``. Its ``manifest.json`` is written last, under another name,
and renamed: a folder without one is not a checkpoint, and goes with the next ``prune``. A folder that is removed loses
it first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from taskmesh.checkpoints.files import MANIFEST, Readable, Record, read_files, read_record, write_files
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.errors import CheckpointError, ConfigurationError

log = logging.getLogger("taskmesh.checkpoints")


class Mirror:
    """One run's checkpoints at one place.

    Args:
        url: what fsspec knows; options of a file system come from fsspec's own configuration.

    Raises:
        ConfigurationError: fsspec is not there, or it does not know such a place.
    """

    def __init__(self, url: str, mesh: str, run: str) -> None:
        self._files, root = _file_system(url)
        self._mesh = mesh
        self._run = run
        self._root = f"{root.rstrip('/')}/{mesh}/{run}"
        self._records: dict[str, Record] = {}  # by folder; they do not change
        self._unreadable: set[str] = set()

    def __repr__(self) -> str:
        return f"<Mirror {self.where}>"

    @property
    def where(self) -> str:
        """The run's folder, as a URL."""
        return str(self._files.unstrip_protocol(self._root))

    def write(self, manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
        """Write one checkpoint. It is there when this returns, and before that it is not.

        Raises:
            CheckpointError: it cannot be written, with the reason.
        """
        folder = self._folder(manifest)
        try:
            self._remove(folder)
            self._files.makedirs(folder, exist_ok=True)
            for name, pieces in write_files(self._mesh, self._run, manifest, parts):
                part_name = f"{folder}/{name}.part" if name == MANIFEST else f"{folder}/{name}"
                with self._files.open(part_name, "wb") as file:
                    for piece in pieces:
                        file.write(piece)
                    _to_disk(file)
                if name == MANIFEST:
                    self._files.mv(part_name, f"{folder}/{name}")
        except CheckpointError:
            raise
        except Exception as error:  # fsspec's file systems raise what their libraries do
            raise CheckpointError(
                f"version {manifest.version} of run {self._run!r} is not on its mirror {self.where}: {_words(error)}"
            ) from error

    def versions(self) -> list[Manifest]:
        """The checkpoints that are complete, oldest first.

        Raises:
            CheckpointError: the place cannot be read, with the reason.
        """
        return [record.manifest for record in self._read_records().values()]

    def load_newest(self) -> tuple[Manifest, dict[str, memoryview]] | None:
        """The newest checkpoint that is whole, with its parts; None where there is none at all.

        Raises:
            CheckpointError: the place cannot be read, or there are checkpoints and none is whole.
        """
        records = self._read_records()
        for folder, record in reversed(records.items()):
            try:
                return record.manifest, self._read(folder, record)
            except CheckpointError as error:
                log.error("%s; looking for an older version", error)
        if records:
            raise CheckpointError(f"{self.where}: none of {len(records)} checkpoints is whole")
        return None

    def prune(self, stay: Collection[int]) -> None:
        """Remove all versions but these, and what was never completed. What is damaged is left to people.

        Raises:
            CheckpointError: it cannot be done, with the reason.
        """
        records = self._read_records()
        try:
            for folder in self._list():
                record = records.get(folder)
                if folder not in self._unreadable and (record is None or record.manifest.version not in stay):
                    self._remove(folder)
        except Exception as error:
            raise CheckpointError(f"{self.where} cannot be pruned: {_words(error)}") from error

    def _folder(self, manifest: Manifest) -> str:
        return f"{self._root}/{manifest.version:09d}-{manifest.token}"

    def _read_records(self) -> dict[str, Record]:
        """The manifests that are there, by folder, oldest first."""
        try:
            folders = self._list()
            for folder in folders:
                if folder not in self._records and folder not in self._unreadable:
                    with contextlib.suppress(FileNotFoundError):
                        self._take(folder, self._files.cat_file(f"{folder}/{MANIFEST}"))
        except Exception as error:
            raise CheckpointError(f"{self.where} cannot be read: {_words(error)}") from error
        found = {folder: record for folder in folders if (record := self._records.get(folder)) is not None}
        return dict(
            sorted(found.items(), key=lambda item: (item[1].manifest.version, item[1].manifest.token))
        )

    def _take(self, folder: str, data: bytes) -> None:
        try:
            self._records[folder] = read_record(data)
        except CheckpointError as error:
            log.error("%s: %s", self._files.unstrip_protocol(folder), error)
            self._unreadable.add(folder)

    def _list(self) -> list[str]:
        """The folders of versions, complete or not."""
        self._files.invalidate_cache()
        try:
            rows = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(str(row["name"]).rstrip("/") for row in rows if row["type"] == "directory")

    def _read(self, folder: str, record: Record) -> dict[str, memoryview]:
        with contextlib.ExitStack() as opened:

            def open_file(name: str) -> Readable:
                return opened.enter_context(self._files.open(f"{folder}/{name}", "rb"))  # type: ignore[no-any-return]

            try:
                return read_files(record, open_file)
            except CheckpointError as error:
                raise CheckpointError(f"{self._files.unstrip_protocol(folder)}: {error}") from None
            except Exception as error:
                raise CheckpointError(
                    f"{self._files.unstrip_protocol(folder)} cannot be read: {_words(error)}"
                ) from error

    def _remove(self, folder: str) -> None:
        self._records.pop(folder, None)
        self._unreadable.discard(folder)
        self._files.invalidate_cache()
        if not self._files.exists(folder):
            return
        for what in (f"{folder}/{MANIFEST}", folder):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(what, recursive=True)


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec  # only for those who mirror
    except ModuleNotFoundError:
        raise ConfigurationError("a mirror needs fsspec: pip install 'taskmesh[mirror]'") from None
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"no mirror can be at {url!r}: {error}") from None
    return files, str(root)


def _to_disk(file: Any) -> None:
    """A local file is safe from a loss of power before the next one is written."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        file.flush()
        os.fsync(file.fileno())


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

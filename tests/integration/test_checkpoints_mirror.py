"""Checkpoints outside Redis: in a folder, and in an S3 bucket of a local server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from torch import nn

from taskmesh import CheckpointError, ConfigurationError, Mesh
from taskmesh.broker.chunks import split
from taskmesh.checkpoints.files import MANIFEST, MODEL
from taskmesh.checkpoints.manifest import Manifest, Part, digest_of
from taskmesh.checkpoints.mirror import Mirror
from taskmesh.checkpoints.tables import memories_of
from taskmesh.events import Committed, MirrorFailed
from taskmesh.keys import RunKeys
from taskmesh.tensors import FlatModel
from taskmesh.training import Every, Finished, TopK, Trainer
from taskmesh.training.step.snapshot import Memory, take_snapshot
from tests.integration.training_support import ONE, Recorder, make_trainer

fsspec = pytest.importorskip("fsspec", reason="a mirror needs fsspec")
MakeMesh = Callable[..., Mesh]
STEPS = 25


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a local S3 server."""
    pytest.importorskip("s3fs", reason="S3 needs s3fs")
    moto = pytest.importorskip("moto.server", reason="the local S3 server is moto's")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line a request
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("backup")
        yield "s3://backup/runs"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the mirror is."""
    if request.param == "folder":
        return f"file://{tmp_path}/runs"
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"


@contextlib.asynccontextmanager
async def workers(mesh: Mesh) -> AsyncIterator[None]:
    async with mesh.worker(ONE):
        yield


def trainer_of(mesh: Mesh, place: str, **changes: Any) -> Trainer:
    return make_trainer(mesh, checkpoint=Every(**{"steps": 10, "keep": 2, "mirror": place, **changes}))


async def train(mesh: Mesh, place: str, steps: int = STEPS, **changes: Any) -> Finished:
    trainer = trainer_of(mesh, place, **changes)
    async with workers(mesh):
        return await trainer.run(steps=steps)


def files_at(place: str) -> set[str]:
    files, root = fsspec.core.url_to_fs(place)
    files.invalidate_cache()
    found: list[str] = files.find(root)
    return {path.rpartition("/runs/")[2].partition("test/")[2] for path in found}


async def test_what_is_kept_is_there_too(mesh: Mesh, place: str) -> None:
    await train(mesh, place)
    names = (MANIFEST, MODEL, "state.safetensors")
    assert files_at(place) == {
        f"digits/{folder}/{name}" for folder in ("000000020-1", "000000025-1") for name in names
    }
    mirror = Mirror(place, "test", "digits")
    assert [manifest.step for manifest in mirror.versions()] == [20, 25]


async def test_anybody_can_read_it(mesh: Mesh, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the reader of others")
    await train(mesh, f"file://{tmp_path}")
    folder = tmp_path / "test" / "digits" / "000000025-1"
    model = await mesh.runs["digits"].load()  # type: ignore[attr-defined]
    loaded = safetensors.load_file(folder / MODEL)
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    state = safetensors.load_file(folder / "state.safetensors")
    assert state["optimizer/state/0/exp_avg"].shape == model.state_dict()["0.weight"].shape
    record = json.loads((folder / MANIFEST).read_text())["record"]
    assert (record["run"], record["manifest"]["step"]) == ("digits", 25)


async def test_a_lost_redis_is_recovered_from_it(
    make_mesh: MakeMesh, place: str, plain: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    expected = await train(make_mesh("straight"), place)
    await train(make_mesh(), place, 13)
    plain.flushall()
    mesh = make_mesh()
    trainer = trainer_of(mesh, place)
    steps: list[int] = []
    async with workers(mesh):
        finished = await trainer.run(steps=STEPS, on_commit=lambda committed: steps.append(committed.step))
        kept = await trainer.versions()
    assert "its server has no whole checkpoint of it; it goes on from version 13, step 13" in caplog.text
    assert steps == list(range(14, STEPS + 1))
    assert (finished.digest, finished.version) == (expected.digest, STEPS)
    assert [manifest.step for manifest in kept] == [20, 25]


async def test_what_compressions_remember_is_there_too(
    make_mesh: MakeMesh, tmp_path: Path, plain: redis.Redis
) -> None:
    place = f"file://{tmp_path}"
    expected = (await train_sparse(make_mesh("straight"), place, STEPS)).digest
    await train_sparse(make_mesh(), place, 13)
    newest = Mirror(place, "test", "digits").load_newest()
    assert newest is not None
    _, parts = newest
    loader = pytest.importorskip("safetensors.numpy", reason="the reader of others")
    state = loader.load_file(tmp_path / "test" / "digits" / "000000013-1" / "state.safetensors")
    for shard, memory in memories_of(parts).items():
        assert state[f"memory/{shard}"].tobytes() == memory
    plain.flushall()
    assert (await train_sparse(make_mesh(), place, STEPS)).digest == expected


async def train_sparse(mesh: Mesh, place: str, steps: int) -> Finished:
    trainer = make_trainer(
        mesh, checkpoint=Every(steps=10, keep=2, mirror=place), compression=TopK(0.05), shards=4
    )
    async with workers(mesh):
        return await trainer.run(steps=steps)


async def test_a_run_that_began_is_not_disturbed_by_it(make_mesh: MakeMesh, place: str) -> None:
    """What is in Redis counts, also when the mirror has something newer."""
    await train(make_mesh(), place, 5)
    mirror = Mirror(place, "test", "digits")
    newest = mirror.load_newest()
    assert newest is not None
    manifest, parts = newest
    other = trainer_of(make_mesh(), place)
    mirror.write(replace(manifest, version=99, step=99), parts)
    async with workers(other.mesh):
        assert (await other.run(steps=6)).version == 6


async def test_damage_is_found_and_the_version_before_is_taken(
    make_mesh: MakeMesh, place: str, plain: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await train(make_mesh(), place)
    files, root = fsspec.core.url_to_fs(place)
    newest = f"{root}/test/digits/000000025-1/{MODEL}"
    data = files.cat_file(newest)
    files.pipe_file(newest, data[:-1] + bytes([data[-1] ^ 1]))
    plain.flushall()
    finished = await train(make_mesh(), place, 21)
    assert "are not what was written; looking for an older version" in caplog.text
    assert (finished.step, finished.version) == (21, 27), "26 is 20 again, and newer than what is damaged"
    assert [manifest.version for manifest in Mirror(place, "test", "digits").versions()] == [26, 27]
    files.pipe_file(f"{root}/test/digits/000000027-1/{MANIFEST}", b"{}")
    assert [manifest.version for manifest in Mirror(place, "test", "digits").versions()] == [26]
    await train(make_mesh(), place, 23)
    assert f"digits/000000027-1/{MANIFEST}" in files_at(place), "what is damaged is left to people"
    assert [manifest.step for manifest in Mirror(place, "test", "digits").versions()] == [20, 23]
    for version in Mirror(place, "test", "digits").versions():
        files.rm(f"{root}/test/digits/{version.version:09d}-{version.token}/{MODEL}")
    plain.flushall()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is whole"):
        await train(make_mesh(), place)


async def test_a_server_whose_checkpoints_are_all_damaged_is_recovered_from_it(
    make_mesh: MakeMesh, place: str, plain: redis.Redis
) -> None:
    """As when a server evicts what it should keep. Of what is damaged nothing is borrowed."""
    await train(make_mesh(), place)
    expected = await train(make_mesh("straight"), place, 30)
    for key in plain.keys("*{test:run:digits:*}:chunk:*"):
        plain.setrange(key, 0, b"?!")
    mesh = make_mesh()
    trainer = trainer_of(mesh, place)
    async with workers(mesh):
        finished = await trainer.run(steps=30)
        kept = await trainer.versions()
        assert (await trainer.store.load_newest() or [None])[0] == kept[-1]
    assert finished.digest == expected.digest
    assert (finished.version, finished.step) == (31, 30), "version 26 is step 25 again"


async def test_what_was_never_completed_is_no_version_and_goes(make_mesh: MakeMesh, place: str) -> None:
    files, root = fsspec.core.url_to_fs(place)
    files.makedirs(f"{root}/test/digits/000000007-1", exist_ok=True)
    files.pipe_file(f"{root}/test/digits/000000007-1/{MODEL}", b"half of it")
    assert Mirror(place, "test", "digits").load_newest() is None
    finished = await train(make_mesh(), place, 3)
    assert finished.version == 3
    assert not any("000000007" in name for name in files_at(place))


async def test_a_rollback_is_there_too(make_mesh: MakeMesh, place: str, plain: redis.Redis) -> None:
    """A lost Redis must not undo it."""
    mesh = make_mesh()
    trainer = trainer_of(mesh, place, keep=4)
    async with workers(mesh):
        await trainer.run(steps=20)
        assert await trainer.rollback(to=10) == 21
    plain.flushall()
    trainer, steps = trainer_of(make_mesh(), place, keep=4), list[int]()
    async with workers(trainer.mesh):
        await trainer.run(steps=12, on_commit=lambda committed: steps.append(committed.step))
    assert steps == [11, 12]


async def test_a_mirror_that_fails_is_loud_and_the_run_goes_on(
    make_mesh: MakeMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = trainer_of(mesh, f"file://{tmp_path}/runs")

    def on_commit(committed: Committed) -> None:
        if committed.step == 5:
            (tmp_path / "runs").rename(tmp_path / "moved")
            (tmp_path / "runs").touch()  # a file, where a folder is wanted
        if committed.step == 15:
            (tmp_path / "runs").unlink()

    async with workers(mesh):
        finished = await trainer.run(steps=STEPS, on_commit=on_commit)
        assert [manifest.step for manifest in await trainer.versions()] == [20, 25]
    assert finished.step == STEPS
    (failed,) = recorder.of(MirrorFailed)
    assert failed.version == 10
    assert "version 10 of run 'digits' is not on its mirror" in caplog.text
    mirror = Mirror(f"file://{tmp_path}/runs", "test", "digits")
    assert [manifest.step for manifest in mirror.versions()] == [20, 25]


async def test_places_that_cannot_be_are_refused(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="no mirror can be at 'nowhere://x'"):
        await train(make_mesh(), "nowhere://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'taskmesh\[mirror\]'"):
        await train(make_mesh(), "file:///tmp/x")


async def test_writers_killed_at_any_point_leave_whole_versions(tmp_path: Path, redis_url: str) -> None:
    """The marker comes last: what is complete is whole, whenever the one who writes it dies."""
    keys = RunKeys("test", "digits")
    mirror = Mirror(f"file://{tmp_path}", keys.mesh, keys.run)
    for kill_at in range(1, 13):
        code = PROGRAM.format(place=f"file://{tmp_path}", kill_at=kill_at)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        await process.wait()
        newest = mirror.load_newest()
        assert newest is None or newest[1]["state"] == b"state %d" % newest[0].version
    assert newest is not None
    mirror.prune({newest[0].version})
    folder = tmp_path / "test" / "digits"
    assert [path.name for path in folder.iterdir()] == [f"{newest[0].version:09d}-1"]


PROGRAM = """
import os, signal
from taskmesh.broker.chunks import split
from taskmesh.checkpoints.manifest import Manifest, Part, digest_of
from taskmesh.checkpoints.mirror import Mirror
from taskmesh.checkpoints.tables import Entry, Index, encode_index
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

left = {kill_at}

def count(function):
    def counted(*args, **kwargs):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return counted

for cls, names in ((LocalFileOpener, ["write"]), (LocalFileSystem, ["makedirs", "mv", "rm"])):
    for name in names:
        setattr(cls, name, count(getattr(cls, name)))
mirror = Mirror("{place}", "test", "digits")
index = Index((Entry(("w",), "float32", (3,), 0),), (Entry(("m",), "float32", (3,), 0),))
for version in (2 * {kill_at}, 2 * {kill_at} + 1):
    values = {{"parameters": b"%012d" % version, "tensors": b"%012d" % version, "state": b"state %d" % version,
              "index": encode_index(index)}}
    parts = {{name: memoryview(value) for name, value in values.items()}}
    described = {{
        name: Part(True, version, 1, 0, len(value), tuple(map(digest_of, split(value))))
        for name, value in parts.items()
    }}
    mirror.write(Manifest(version, 0, version, version, 1, True, "", described), parts)
    mirror.prune({{version}})
"""


def test_the_flat_layout_and_the_files_agree(tmp_path: Path) -> None:
    """Float buffers, integer buffers and padding between them, by way of a real model."""
    safetensors = pytest.importorskip("safetensors.torch", reason="the reader of others")
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    flat = FlatModel(model)
    parts = take_snapshot(flat, {}, Memory()).parts
    described = {
        name: Part(True, 1, 1, 0, len(value), tuple(map(digest_of, split(value))))
        for name, value in parts.items()
    }
    mirror = Mirror(f"file://{tmp_path}", "test", "digits")
    mirror.write(Manifest(1, 0, 1, 1, 1, True, flat.layout.digest, described), parts)
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    other.load_state_dict(safetensors.load_file(tmp_path / "test" / "digits" / "000000001-1" / MODEL))
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    newest = mirror.load_newest()
    assert newest is not None
    assert newest[1] == parts

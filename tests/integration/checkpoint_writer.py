"""Leads a run and writes kept versions without end, until it is killed: ``checkpoint_writer.py URL``."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from taskmesh.broker.caller import Caller
from taskmesh.broker.connect import Server
from taskmesh.checkpoints.lease import Lease
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.retention import Every
from taskmesh.checkpoints.store import Commit, VersionStore
from taskmesh.clock import Clock, SystemClock
from taskmesh.keys import RunKeys

KEYS = RunKeys("test", "saved")
SIZE_BYTES = 3 * 1024 * 1024
RULE = Every(keep=2)
LEASE_TTL = 0.2


async def connect(url: str, clock: Clock | None = None) -> Caller:
    return Caller(await Server.connect(url), clock or SystemClock(), 5.0)


def content(version: int) -> bytes:
    return version.to_bytes(4, "big") * (SIZE_BYTES // 4)


def parts_of(version: int) -> dict[str, bytes]:
    """The middle third of the parameters is the same in all versions."""
    third = SIZE_BYTES // 3
    whole = content(version)
    return {"parameters": whole[:third] + bytes(third) + whole[2 * third :], "state": b"state %d" % version}


async def make_current(store: VersionStore, token: int, version: int) -> Manifest:
    part = await store.write(version, token, content(version))
    parts = {"parameters": part}
    manifest = Manifest(version, version - 1, version, version, token, False, "layout", parts)
    await store.commit(Commit(manifest, ledger=b"entry %d" % version), token)
    return manifest


async def keep(
    store: VersionStore, token: int, current: Manifest, earlier: Manifest | None = None
) -> Manifest:
    parts = await store.write_kept(current.version, token, parts_of(current.version), earlier)
    manifest = replace(current, kept=True, parts=parts)
    kept = [*(await store.kept()), manifest]
    stay = RULE.retained(kept)
    await store.keep(manifest, token, [old for old in kept if old.version not in stay], current)
    return manifest


async def save(store: VersionStore, token: int, version: int, earlier: Manifest | None = None) -> Manifest:
    """One step of a run whose every version is kept."""
    current = await make_current(store, token, version)
    manifest = await keep(store, token, current, earlier)
    await store.forget(current.parts["parameters"])
    return manifest


async def main(url: str) -> None:
    caller = await connect(url)
    store = VersionStore(caller, caller, KEYS)
    token = await Lease(caller, KEYS, LEASE_TTL).acquire()
    await store.sweep(token)
    before = await store.current()
    newest = await store.load_newest()
    earlier = None if newest is None else newest[0]
    print("leads", flush=True)
    current = await make_current(store, token, 1 if before is None else before.version + 1)
    while True:  # one version is kept beside the step that leads to the next, as in a run
        following, earlier = await asyncio.gather(
            make_current(store, token, current.version + 1), keep(store, token, current, earlier)
        )
        await store.forget(current.parts["parameters"])
        current = following


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""Leads a run and writes kept versions without end, until it is killed: ``checkpoint_writer.py URL``."""

from __future__ import annotations

import asyncio
import sys

from taskmesh.broker.caller import Caller
from taskmesh.broker.connect import Server
from taskmesh.checkpoints.lease import Lease
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.retention import Every
from taskmesh.checkpoints.store import Commit, VersionStore
from taskmesh.clock import Clock, SystemClock
from taskmesh.keys import RunKeys

KEYS = RunKeys("test", "saved")
SIZE_BYTES = 3_000_000
RULE = Every(keep=2)
LEASE_TTL = 0.2


async def connect(url: str, clock: Clock | None = None) -> Caller:
    return Caller(await Server.connect(url), clock or SystemClock(), 5.0)


def content(version: int) -> bytes:
    return version.to_bytes(4, "big") * (SIZE_BYTES // 4)


async def save(store: VersionStore, token: int, version: int) -> Manifest:
    parts = {"parameters": content(version), "state": b"state %d" % version}
    described = await store.write(version, token, parts, kept=True)
    manifest = Manifest(version, version - 1, version, version, token, True, "layout", described)
    kept = [*(await store.kept()), manifest]
    stay = RULE.retained(kept)
    dropped = [old for old in kept if old.version not in stay]
    await store.commit(Commit(manifest, dropped, b"entry %d" % version), token)
    return manifest


async def main(url: str) -> None:
    caller = await connect(url)
    store = VersionStore(caller, caller, KEYS)
    token = await Lease(caller, KEYS, LEASE_TTL).acquire()
    await store.sweep(token)
    current = await store.current()
    version = 0 if current is None else current.version
    print("leads", flush=True)
    while True:
        version += 1
        await save(store, token, version)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

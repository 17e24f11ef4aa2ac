"""The Lua scripts. Each file's head lists its keys, arguments and reply; its typed wrapper is in the module above."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Script:
    """A script's source, and the digest by which the server knows it."""

    name: str
    source: bytes
    sha: bytes


def _load(name: str) -> Script:
    source = resources.files(__name__).joinpath(f"{name}.lua").read_bytes()
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())


OPEN = _load("open")
SUBMIT = _load("submit")
FETCH = _load("fetch")
SETTLE = _load("settle")
JOIN = _load("join")
LEAVE = _load("leave")
HEARTBEAT = _load("heartbeat")
LOOK = _load("look")
CLAIM = _load("claim")
HAND_BACK = _load("hand_back")
PROMOTE = _load("promote")
CANCEL = _load("cancel")
REQUEUE = _load("requeue")
FIND = _load("find")
SWEEP = _load("sweep")
LEAD = _load("lead")
KEEP_LEAD = _load("keep_lead")
RESERVE = _load("reserve")
COMMIT = _load("commit")
KEEP = _load("keep")
DROP = _load("drop")
DELETE_RUN = _load("delete_run")

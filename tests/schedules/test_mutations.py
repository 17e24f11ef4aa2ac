"""Faults that are put into the engine are found, so the schedules can fail."""

from __future__ import annotations

import pytest

from taskmesh.testing import RedisServer
from tests.schedules import mutations
from tests.schedules.explore import first_failure
from tests.schedules.node import Backend

SEED = "mutation"
WITHIN = 600
# Those that need a rarer turn of events are looked for by ``python -m tests.schedules.explore --mutations`` alone.
RARE = (
    "settle numbers without slots",
    "claim without another look",
    "hand back without a look at the owner",
    "leave without a look at the pending",
    "no sweep",
)


@pytest.mark.parametrize("name", [name for name in mutations.LUA if name not in RARE])
def test_a_fault_in_a_script_is_found(schedule_server: RedisServer, name: str) -> None:
    backend = Backend(schedule_server.port, mutations.LUA[name])
    try:
        assert first_failure(backend, SEED, WITHIN)
    finally:
        backend.close()


@pytest.mark.parametrize("name", list(mutations.ENGINE))
def test_a_fault_in_the_engine_is_found(backend: Backend, name: str) -> None:
    with mutations.in_engine(name):
        assert first_failure(backend, SEED, WITHIN)

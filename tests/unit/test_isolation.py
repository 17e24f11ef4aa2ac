"""Who runs apart from the others, and when a message is given up."""

from __future__ import annotations

from typing import Any, cast

import pytest

from taskmesh import Mesh, MeshSettings
from taskmesh.messages import Message, Priority
from taskmesh.tasks import TaskDefinition
from taskmesh.worker.deliveries import Delivery
from taskmesh.worker.isolate import Isolated
from taskmesh.worker.processes import Processes, is_suspect

mesh = Mesh("isolation")


@mesh.task
def ordinary() -> None: ...


@mesh.task(process=True)
def always() -> None: ...


@mesh.task(process=False)
def never() -> None: ...


@mesh.task(max_deliveries=1)
def once() -> None: ...


@mesh.task(process=True, max_deliveries=1)
def once_in_a_process() -> None: ...


def delivered(task: TaskDefinition, deliveries: int, arrived: float = 0.0) -> Delivery:
    message = Message("0" * 20, task.name)
    nowhere = cast(Any, None)
    return Delivery(nowhere, Priority.NORMAL, b"1-1", b"", message, task, deliveries, 1, arrived)


@pytest.fixture
def processes() -> Processes:
    return Processes(list(mesh.registry), MeshSettings(), count=1)


@pytest.mark.parametrize(
    ("most", "deliveries", "suspect"),
    [(3, 1, False), (3, 2, False), (3, 3, True), (3, 9, True), (2, 1, False), (2, 2, True), (9, 2, False)]
    + [(9, 3, True), (1, 1, False)],
)
def test_two_deaths_make_a_message_suspect(most: int, deliveries: int, suspect: bool) -> None:
    task = Mesh("other").task(max_deliveries=most)(never.definition.function).definition
    assert is_suspect(delivered(task, deliveries)) is suspect


def test_suspects_and_those_that_ask_for_it_run_in_processes(processes: Processes) -> None:
    assert not processes.take(delivered(ordinary.definition, 2))
    assert processes.take(delivered(ordinary.definition, 3))
    assert processes.take(delivered(always.definition, 1))
    assert not processes.take(delivered(never.definition, 3))
    assert not processes.takes_any


def test_workers_deaths_condemn_what_runs_in_them_and_spare_what_runs_in_processes(
    processes: Processes,
) -> None:
    most = [
        processes.most_deliveries(delivered(task.definition, 2))
        for task in (ordinary, always, never, once, once_in_a_process)
    ]
    assert most == [3, 30, 3, 1, 1]
    assert processes.most_deliveries(delivered(ordinary.definition, 3)) == 30


def test_a_stock_waits_for_processes_and_the_rest_goes_to_others(processes: Processes) -> None:
    line = Isolated(processes, cast(Any, None), cast(Any, None))
    deliveries = [delivered(always.definition, 1, arrived=float(n)) for n in range(5)]
    for delivery in deliveries:
        line.add(delivery)
    assert line.next() is deliveries[0]
    assert line.next() is None  # there is one process
    assert line.is_crowded
    assert line.take_excess(now=1.2, patience=0.5) == []
    assert line.take_excess(now=9.0, patience=0.5) == deliveries[3:]
    assert not line.is_crowded
    assert (len(line), line.free) == (2, -2)

"""Watching a Mesh: the table of metrics, what this process counted, and the state of the whole."""

from taskmesh.monitoring.metrics import METRICS, CountingObserver, Histogram, Kind, Level, Metric, Samples
from taskmesh.monitoring.snapshot import RunReader, snapshot
from taskmesh.monitoring.status import (
    LaneStatus,
    MeshSnapshot,
    QueueStatus,
    RunStatus,
    ServerStatus,
    WorkerStatus,
)

__all__ = [
    "METRICS",
    "CountingObserver",
    "Histogram",
    "Kind",
    "LaneStatus",
    "Level",
    "MeshSnapshot",
    "Metric",
    "QueueStatus",
    "RunReader",
    "RunStatus",
    "Samples",
    "ServerStatus",
    "WorkerStatus",
    "snapshot",
]

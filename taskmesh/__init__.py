"""taskmesh: an asyncio task framework over one Redis."""

from taskmesh.app.mesh import Mesh
from taskmesh.app.task import BoundCall, Task
from taskmesh.broker.streams import Cancelled
from taskmesh.errors import (
    BrokerError,
    BrokerFull,
    BrokerRefused,
    BrokerUnavailable,
    CheckpointError,
    ConfigurationError,
    DecodeError,
    EmbeddedServerError,
    InvalidArguments,
    LeadershipLost,
    NotConfirmed,
    PayloadTooLarge,
    QueueFull,
    ResultError,
    ResultTimeout,
    ResultUnavailable,
    ServerTooOld,
    SubmitError,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskmeshError,
    TrainingError,
    UnknownTask,
)
from taskmesh.messages import DeadLetter, Priority
from taskmesh.results.collector import as_completed
from taskmesh.results.handle import Handle, Handles
from taskmesh.settings import Durability, MeshSettings, QueueOptions, WorkerSettings
from taskmesh.tasks import Batch, Call, Context, Next, Retry
from taskmesh.worker.runtime import Worker

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BoundCall",
    "BrokerError",
    "BrokerFull",
    "BrokerRefused",
    "BrokerUnavailable",
    "Call",
    "Cancelled",
    "CheckpointError",
    "ConfigurationError",
    "Context",
    "DeadLetter",
    "DecodeError",
    "Durability",
    "EmbeddedServerError",
    "Handle",
    "Handles",
    "InvalidArguments",
    "LeadershipLost",
    "Mesh",
    "MeshSettings",
    "Next",
    "NotConfirmed",
    "PayloadTooLarge",
    "Priority",
    "QueueFull",
    "QueueOptions",
    "ResultError",
    "ResultTimeout",
    "ResultUnavailable",
    "Retry",
    "ServerTooOld",
    "SubmitError",
    "Task",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskmeshError",
    "TrainingError",
    "UnknownTask",
    "Worker",
    "WorkerSettings",
    "as_completed",
]

"""Every error that taskmesh raises.

TaskmeshError
├── ConfigurationError          a setting, URL, queue or task definition that cannot work
├── BrokerError                 the server, or the way to it
│   ├── BrokerUnavailable       no server answers there; what was in flight may or may not have been accepted
│   ├── BrokerRefused           the server answers and says no (password, ACL, a command it lacks)
│   ├── ServerTooOld            the server lacks what taskmesh needs (Redis 7.0, Valkey 8)
│   ├── BrokerFull              the server is at its memory limit; nothing was accepted
│   ├── NotConfirmed            accepted and going to run, but not confirmed as Durability asks
│   └── EmbeddedServerError     the local server could not be found or started
├── SubmitError                 nothing was submitted
│   ├── UnknownTask             no task of that name in this Mesh
│   ├── InvalidArguments        the arguments do not fit the handler's signature
│   ├── PayloadTooLarge         over the size limit
│   └── QueueFull               a bounded queue has no room
├── DecodeError                 bytes that are not a message of a version known here
├── ResultError                 there is no value to return
│   ├── TaskFailed              the handler raised; carries type, message and remote traceback
│   ├── TaskCancelled           it was cancelled through its handle
│   ├── TaskExpired             it was not started before its expiry
│   ├── ResultTimeout           no outcome yet; also a TimeoutError
│   └── ResultUnavailable       results are off for this task, or the record's time to live has passed
├── LeadershipLost              another master holds the lease; this one's writes are refused
├── CheckpointError             a version that is missing, incomplete or corrupt
└── TrainingError               a run that cannot go on, with the reason
"""

from __future__ import annotations

from typing import Any


class TaskmeshError(Exception):
    """The root of every error that taskmesh raises."""


class ConfigurationError(TaskmeshError):
    """A setting, URL, queue or task definition that cannot work."""


class BrokerError(TaskmeshError):
    """The server, or the way to it."""


class BrokerUnavailable(BrokerError):
    """No server answers, or the connection was lost and the time to try again has run out."""


class BrokerRefused(BrokerError):
    """The server answered with an error that trying again does not mend."""


class ServerTooOld(BrokerError):
    """The server's version lacks what taskmesh needs."""


class BrokerFull(BrokerError):
    """The server is at its memory limit and refused new work; nothing of the call was accepted."""


class NotConfirmed(BrokerError):
    """The primary has accepted the messages, and they run; what ``Durability`` asks for did not come in time.

    Attributes:
        submitted: the Handle, or the Handles of ``submit_many`` so far (what comes after them is not submitted).
        places: where the server put the messages.
    """

    def __init__(self, message: str, places: list[str | None] | None = None) -> None:
        super().__init__(message)
        self.submitted: Any = None
        self.places = places or []


class EmbeddedServerError(BrokerError):
    """The local server could not be found, started or reached."""


class SubmitError(TaskmeshError):
    """The call was refused before anything was submitted."""


class UnknownTask(SubmitError):
    """No task of that name is registered with this Mesh."""


class InvalidArguments(SubmitError):
    """The arguments do not fit the handler's signature or annotations, or cannot travel."""


class PayloadTooLarge(SubmitError):
    """Arguments or a result over the size limit."""


class QueueFull(SubmitError):
    """The queue's bound is reached: at once under ``when_full="reject"``, else when the wait ran out."""


class DecodeError(TaskmeshError):
    """Bytes that are no message or outcome, of a version that is not known here, or not signed as they must be."""


class ResultError(TaskmeshError):
    """A task that ended without a value, or whose end is not known."""


class TaskFailed(ResultError):
    """The handler raised, and its retries are spent.

    Attributes:
        type: the qualified name of the remote exception's class.
        message: its text.
        traceback: the remote traceback as text.
    """

    def __init__(self, type: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{type}: {message}" if message else type)
        self.type = type
        self.message = message
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[TaskFailed], tuple[str, str, str]]:
        return (TaskFailed, (self.type, self.message, self.traceback))


class TaskCancelled(ResultError):
    """The task was cancelled through its handle.

    Not an ``asyncio.CancelledError``: that one means that the *waiting* code is being cancelled.
    """


class TaskExpired(ResultError):
    """The task was not started before its expiry, and was dropped."""


class ResultTimeout(ResultError, TimeoutError):
    """No outcome within the timeout; the task goes on, and the handle can be awaited again."""


class ResultUnavailable(ResultError):
    """Results are off for this task, or the record's time to live has passed."""


class LeadershipLost(TaskmeshError):
    """Another master holds the lease with a higher fencing token; the write was refused."""


class CheckpointError(TaskmeshError):
    """A version that is missing, incomplete or corrupt."""


class TrainingError(TaskmeshError):
    """A run that cannot go on; the message says why."""

"""The ranks of a group that torchrun has started, and what passes between them: torch.distributed's collectives.

gloo carries what lies on the CPU, NCCL what lies on GPUs. Every rank takes part in everything here, in the same order;
it belongs in the compute thread. When a rank is lost, what the others were at can end in no other way than with them:
they end at once, their worker is not heard of any more, and other workers take over its shards.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from taskmesh.errors import ConfigurationError

log = logging.getLogger("taskmesh.training")
LEADER = 0
PATIENCE = timedelta(minutes=10)  # a rank that the others have waited for so long is lost
ALIKE = timedelta(seconds=5)  # what fails on all ranks fails on them within so long
EXIT_LOST = 1


class Ranks:
    """This process's place in its group.

    Attributes:
        size: how many ranks there are.
        rank: which of them this is; rank 0 leads.
    """

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        # Not the default group: what a model's own parallelism does there must not be taken for ours.
        self._group = dist.new_group(timeout=PATIENCE, backend="gloo")
        self._gpus = dist.new_group(timeout=PATIENCE, backend="nccl") if has_gpus() else None

    @classmethod
    def join(cls) -> Ranks:
        """Meet the other ranks, as torchrun's environment says.

        Raises:
            ConfigurationError: torchrun has not started this process, or they cannot meet.
        """
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus() else "gloo", timeout=PATIENCE)
            local = dist.get_node_local_rank()
            if has_gpus() and local < torch.cuda.device_count():
                torch.cuda.set_device(local)
            return cls()
        except ValueError as error:
            raise ConfigurationError(
                "a group is started by torchrun, as in `torchrun --standalone --nproc-per-node 2 -m taskmesh worker "
                f"app:mesh --group`: {error}"
            ) from error
        except RuntimeError as error:
            raise ConfigurationError(f"the ranks of the group do not meet: {error}") from error

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    def leave(self) -> None:
        """Part, when nothing is left to do together."""
        self.gather(0)
        dist.destroy_process_group()

    def end(self, reason: str) -> NoReturn:
        """End this process, and with it the group: the ranks cannot go on together."""
        log.error("rank %d of %d ends, and the group with it: %s", self.rank, self.size, reason)
        logging.shutdown()
        os._exit(EXIT_LOST)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.end(f"another one is lost: {str(error).partition('. ')[0]}")

    def all_failed(self) -> bool:
        """Whether the others call this, too: to be called by a rank that has failed."""
        try:
            dist.monitored_barrier(self._group, ALIKE)
        except RuntimeError:
            return False
        return True

    def tell(self, message: bytes) -> None:
        """The leader's part of ``hear``."""
        with self._together():
            dist.broadcast(torch.tensor([len(message)]), LEADER, self._group)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), LEADER, self._group)

    def hear(self) -> bytes:
        """What the leader tells."""
        with self._together():
            length = torch.empty(1, dtype=torch.int64)
            dist.broadcast(length, LEADER, self._group)
            message = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(message, LEADER, self._group)
        return message.numpy().tobytes()

    def share(self, values: memoryview) -> None:
        """The leader's bytes are written into those of the others, which are as many."""
        if len(values):
            with self._together():
                dist.broadcast(torch.frombuffer(values, dtype=torch.uint8), LEADER, self._group)

    def gather(self, *numbers: float) -> list[list[float]]:
        """Some numbers of each rank, the same on all."""
        found = [torch.empty(len(numbers), dtype=torch.float64) for _ in range(self.size)]
        with self._together():
            dist.all_gather(found, torch.tensor(numbers, dtype=torch.float64), self._group)
        return [each.tolist() for each in found]

    def texts(self, text: str) -> list[str]:
        """A text of each rank, the same on all."""
        data = text.encode()
        lengths = [int(length) for (length,) in self.gather(len(data))]
        padded = torch.frombuffer(bytearray(data.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        with self._together():
            dist.all_gather(found, padded, self._group)
        return [each.numpy().tobytes()[:length].decode() for each, length in zip(found, lengths, strict=True)]

    def begin_sum(self, values: Tensor) -> dist.Work:
        """Begin to replace values by their sum over the ranks."""
        with self._together():
            group = self._group if values.device.type == "cpu" else self._gpus
            work: dist.Work = dist.all_reduce(values, group=group, async_op=True)
        return work

    def finish(self, work: dist.Work) -> None:
        """See that a sum is there."""
        with self._together():
            work.wait()

    def sum(self, values: Tensor) -> None:
        """Replace values by their sum over the ranks."""
        self.finish(self.begin_sum(values))


def has_gpus() -> bool:
    """Whether the ranks can sum on GPUs."""
    return torch.cuda.is_available() and dist.is_nccl_available()

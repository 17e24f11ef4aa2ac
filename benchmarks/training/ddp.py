"""One rank of DDP over gloo, on the same work:  python -m benchmarks.training.ddp RANK

Rank 0 tells how long a step, an all-reduce of the gradient and a step without it take; or, with a chase, it follows the
validation loss as our master does.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training.chase import Chaser
from benchmarks.training.lines import tell
from benchmarks.training.plan import Ranks, read_ranks
from benchmarks.training.works import Work, make_work
from taskmesh.training.data import Sampler
from taskmesh.training.plan import split

# PowerSGD's all-reduces follow one another in callbacks: with several buckets, two ranks may come to them in different
# order, and gloo matches them by order. What it sends is small, so that overlap within a step is no loss.
ONE_BUCKET_MB = 1024


def _add_hook(model: DistributedDataParallel, hook: str) -> None:
    if hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
    elif hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)


class Rank:
    """A process of the group: the same first parameters and the same batches as on our side, a part of each here."""

    def __init__(self, ranks: Ranks, work: Work, rank: int) -> None:
        self._ranks = ranks
        self._work = work
        self._rank = rank
        torch.manual_seed(ranks.plan.seed)
        self.model = work.model()
        bucket_mb = ONE_BUCKET_MB if ranks.hook == "powersgd" else None
        self.wrapped = DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb)
        _add_hook(self.wrapped, ranks.hook)
        self._optimizer = work.optimizer(self.wrapped.parameters())
        self._sampler = Sampler(len(work.data), ranks.plan.batch, ranks.plan.seed)

    def step(self, number: int) -> None:
        """One update, from 1."""
        indices = split(self._sampler.batch(number - 1), self._ranks.count)[self._rank]
        self._optimizer.zero_grad()
        losses = self._work.loss(cast(torch.nn.Module, self.wrapped), self._work.data.fetch(indices))
        losses.mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def measure(self) -> None:
        """Median seconds over the last two thirds of so many steps, all ranks beginning together."""
        gradient = torch.randn(sum(parameter.numel() for parameter in self.model.parameters()))

        def alone(number: int) -> None:
            with self.wrapped.no_sync():
                self.step(number)

        kinds: dict[str, Callable[[int], object]] = {
            "step_s": self.step, "all_reduce_s": lambda _: dist.all_reduce(gradient), "local_step_s": alone
        }  # fmt: skip
        found: dict[str, float] = {}
        for kind, work in kinds.items():
            seconds = []
            for number in range(1, self._ranks.plan.steps + 1):
                dist.barrier()
                began = time.perf_counter()
                work(number)
                seconds.append(time.perf_counter() - began)
            found[kind] = statistics.median(seconds[len(seconds) // 3 :])
        if self._rank == 0:
            tell(measured=found)

    def chase(self) -> None:
        """Go on until the validation loss is low enough, or the steps are over."""
        chase = self._ranks.plan.chase
        assert chase is not None
        chaser = Chaser(chase, self._work, self.model.parameters) if self._rank == 0 else None
        for number in range(1, self._ranks.plan.steps + 1):
            self.step(number)
            if number % chase.every == 0:
                arrived = torch.tensor([chaser is not None and chaser.has_arrived(number)], dtype=torch.uint8)
                dist.broadcast(arrived, 0)
                if arrived:
                    return


def main() -> None:
    """Be one rank, to the end."""
    rank, ranks = int(sys.argv[1]), read_ranks()
    os.environ.update(MASTER_ADDR=ranks.host, MASTER_PORT=str(ranks.port), GLOO_SOCKET_IFNAME=ranks.interface)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks.count)
    this = Rank(ranks, make_work(ranks.plan), rank)
    dist.barrier()
    if ranks.plan.chase is None:
        this.measure()
    else:
        this.chase()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

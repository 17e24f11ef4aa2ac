"""Models that the ranks of a group share, plugged in where docs/training.md says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


class Fsdp:
    """FSDP, as docs/training.md has it."""

    def wrap(self, model: nn.Module) -> nn.Module:
        sharded = fully_shard(model)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
        self.model = model
        return model

    def load(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                assert isinstance(parameter, DTensor)
                whole = distribute_tensor(values[name], parameter.device_mesh, parameter.placements)
                parameter.copy_(whole)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradient(self, into: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter.grad, DTensor):
                into[name].copy_(parameter.grad.full_tensor())
                parameter.grad = None


class Ddp:
    """DistributedDataParallel itself."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.model = model
        return DistributedDataParallel(model)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """They lie in the model already."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradient(self, into: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            into[name].copy_(parameter.grad).mul_(dist.get_world_size())  # it averages

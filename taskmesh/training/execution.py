"""How a worker computes its shards: precision, memory, device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from taskmesh.errors import ConfigurationError
from taskmesh.training.parallel import Parallel

# A half-precision gradient below 6e-8 is nothing: the loss is scaled up, and its gradient down again, by powers of two.
# What overflows is tried again with the next.
SCALES = (2.0**14, 2.0**7, 1.0)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Execution:
    """How shards are computed.

    Attributes:
        precision: of the forward pass where torch's autocast finds it safe; parameters, gradients and sums stay fp32.
        micro_batch: samples that are computed at once; a shard's gradient is accumulated over as many passes as it
            takes. None for the whole shard.
        recompute: kinds of modules whose activations are not kept for backward but computed again (activation
            checkpointing): memory for time.
        compile: compile the model (``torch.compile``); not in a deterministic run.
        tf32: let matrix products on GPUs round their inputs to TF32.
        device: where the model is computed; "auto" is the GPU where there is one.
        parallel: makes how the ranks of a group hold the model; None where each has all of it.
    """

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    micro_batch: int | None = None
    recompute: tuple[type[nn.Module], ...] = ()
    compile: bool = False
    tf32: bool = False
    device: str = "cpu"
    parallel: Callable[[], Parallel] | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", *_DTYPES):
            raise ConfigurationError(f"precision is {self.precision!r}; write 'fp32', 'bf16' or 'fp16'")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigurationError(f"micro_batch is {self.micro_batch}; it must be at least 1")

    @property
    def name(self) -> str:
        """What of it changes the bits, in words."""
        parts: list[str] = [self.precision]
        if self.micro_batch is not None:
            parts.append(f"micro-batches of {self.micro_batch}")
        if self.compile:
            parts.append("compiled")
        if self.tf32:
            parts.append("TF32")
        return ", ".join(parts)

    def resolve_device(self) -> torch.device:
        """The device on this machine.

        Raises:
            ConfigurationError: there is no such device here.
        """
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"device {name!r}: {str(error).splitlines()[0]}") from None
        return torch.device(name)

    @property
    def scales(self) -> Sequence[float]:
        """By what the loss is multiplied, in turn, until its gradient is finite."""
        return SCALES if self.precision == "fp16" else (1.0,)

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as it is to be kept."""
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        for module in model.modules():
            if self.recompute and isinstance(module, self.recompute):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        return model.to(device)

    def callable(self, model: nn.Module) -> nn.Module:
        """The model as it is to be called."""
        if not self.compile:
            return model
        compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
        return compiled

    @contextlib.contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        """The forward pass happens in here."""
        dtype = _DTYPES.get(self.precision)
        if dtype is None:
            yield
            return
        with torch.autocast(device.type, dtype):
            yield


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device; tuples, lists and dicts are looked into."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(each, device) for each in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(each, device) for each in batch)
    if isinstance(batch, dict):
        return {key: to_device(each, device) for key, each in batch.items()}
    return batch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on a GPU or beside it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)

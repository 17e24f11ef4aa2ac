"""Whether data are those that a run was begun with, when their length says nothing: cheaply, by a few samples."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from taskmesh.tensors import drawing
from taskmesh.training.data import Dataset
from taskmesh.training.seeds import derive

log = logging.getLogger("taskmesh.training")
SAMPLES = 8  # that are looked at, from the first to the last
DIGEST_BYTES = 16


def identify(data: Dataset[Any], seed: int) -> str:
    """What tells data from others of their length; "" where nothing can be said.

    It is their own ``identity`` where they have one, else a digest of a few samples, fetched under a fixed seed. Data
    that are not the same when they are fetched again, that cannot be fetched here, or that consist of what has no fixed
    bytes, have none. Belongs in the compute thread.
    """
    own = getattr(data, "identity", None)
    if own is not None:
        return f"identity {own() if callable(own) else own}"
    last = len(data) - 1
    indices = sorted({last * place // (SAMPLES - 1) for place in range(SAMPLES)})
    try:
        first, again = (_digest(data, indices, seed) for _ in range(2))
    except Exception as error:  # whatever the data raise: the master needs no samples
        log.debug("the data's samples are not looked at: %r", error)
        return ""
    return f"samples {first}" if first == again else ""


def _digest(data: Dataset[Any], indices: list[int], seed: int) -> str:
    with drawing(derive(seed, "identity", bits=64)), torch.no_grad():
        batch = data.fetch(indices)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add(digest, batch)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Put a value into a digest.

    Raises:
        TypeError: it has no fixed bytes.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        digest.update(f"array {value.dtype} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        _add(digest, list(value.items()))
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)} ".encode())
        for each in value:
            _add(digest, each)
    elif value is None or isinstance(value, str | bytes | bool | int | float):
        digest.update(f"{type(value).__name__} {value!r} ".encode())
    else:
        raise TypeError(f"a {type(value).__name__} has no fixed bytes")

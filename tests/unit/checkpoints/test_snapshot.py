"""A run's state, copied aside and put together again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from taskmesh.checkpoints.tables import decode_index
from taskmesh.codec import pack_value
from taskmesh.errors import CheckpointError, ConfigurationError
from taskmesh.tensors import FlatModel
from taskmesh.training.step.snapshot import Memory, read_state, take_snapshot


def flat() -> FlatModel:
    return FlatModel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


def there_and_back(state: dict[str, Any]) -> dict[str, Any]:
    return read_state(take_snapshot(flat(), state, Memory()).parts)


def test_values_of_all_kinds_come_back() -> None:
    state = {
        "tensors": [
            torch.arange(3),
            torch.tensor(1.5),
            torch.randn(2, 3).to(torch.bfloat16),
            torch.empty(0, 4),
        ],
        "bytes": {"mask": torch.tensor([True, False]), 7: torch.tensor([1, -2], dtype=torch.int8)},
        "array": OrderedDict(residual=np.linspace(0, 1, 5, dtype=np.float32)),
        "plain": [1, 2.5, "text", None, True, b"bytes", {"nested": [[]]}],
    }
    found = there_and_back(state)
    for got, wanted in zip(found["tensors"], state["tensors"], strict=True):
        assert got.dtype == wanted.dtype  # type: ignore[attr-defined]
        assert torch.equal(got, wanted)
    assert torch.equal(found["bytes"]["mask"], state["bytes"]["mask"])  # type: ignore[call-overload]
    assert torch.equal(found["bytes"][7], state["bytes"][7])  # type: ignore[call-overload]
    assert isinstance(found["array"]["residual"], np.ndarray)
    np.testing.assert_array_equal(found["array"]["residual"], state["array"]["residual"])  # type: ignore[call-overload]
    assert found["plain"] == state["plain"]


def test_an_optimizers_state_comes_back_and_goes_on_alike() -> None:
    def make() -> tuple[FlatModel, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = flat()
        return model, torch.optim.Adam(model.model.parameters(), lr=0.1, amsgrad=True)

    def step(model: FlatModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
        gradient = torch.randn(model.layout.parameter_count, generator=torch.Generator().manual_seed(seed))
        model.use_gradient(gradient)
        optimizer.step()

    model, optimizer = make()
    for seed in range(3):
        step(model, optimizer, seed)
    parts = take_snapshot(model, {"optimizer": optimizer.state_dict()}, Memory()).parts
    again, other = make()
    again.load(parts["parameters"])
    other.load_state_dict(read_state(parts)["optimizer"])
    for each in ((model, optimizer), (again, other)):
        step(*each, seed=9)
    assert torch.equal(model.values, again.values)


def test_it_is_a_copy_of_this_instant() -> None:
    model, moment = flat(), torch.ones(5)
    settings = {"lr": [0.1]}
    before = bytes(model.view())
    parts = take_snapshot(model, {"moment": moment, "settings": settings}, Memory()).parts
    model.values.add_(1.0)
    moment.zero_()
    settings["lr"][0] = 9.0
    assert parts["parameters"] == before
    state = read_state(parts)
    assert torch.equal(state["moment"], torch.ones(5))
    assert state["settings"] == {"lr": [0.1]}
    state["moment"].zero_()
    assert torch.equal(read_state(parts)["moment"], torch.ones(5)), "nor does what was read share its memory"


def test_memory_is_used_again() -> None:
    model, memory = flat(), Memory()
    places = [
        np.frombuffer(
            take_snapshot(model, {"moment": torch.ones(5)}, memory).parts["parameters"], np.uint8
        ).ctypes.data
        for _ in range(2)
    ]
    assert places[0] == places[1]
    grown = take_snapshot(model, {"moment": torch.ones(50)}, memory).parts
    assert torch.equal(read_state(grown)["moment"], torch.ones(50))


def test_the_index_names_what_lies_where() -> None:
    model = flat()
    parts = take_snapshot(model, {"optimizer": {0: torch.ones(2)}}, Memory()).parts
    index = decode_index(parts["index"], len(parts["parameters"]), len(parts["tensors"]))
    names = {entry.name: entry for entry in index.parameters}
    assert set(names) == set(model.model.state_dict())
    for name, tensor in model.model.state_dict().items():
        entry = names[name]
        data = parts["parameters"][entry.at : entry.at + entry.size_bytes]
        assert data.tobytes() == tensor.numpy().tobytes()
    assert [entry.name for entry in index.tensors] == ["optimizer/0"]


@pytest.mark.parametrize(
    "value",
    [object(), torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex128), {(1, 2): torch.ones(1)}],
    ids=["object", "sparse", "complex128", "key"],
)
def test_what_cannot_be_saved_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="cannot be saved"):
        take_snapshot(flat(), {"value": value}, Memory())


def test_damage_is_found() -> None:
    parts = take_snapshot(flat(), {"a": {"b": torch.ones(3)}}, Memory()).parts
    for name, data in (
        ("state", b""),
        ("state", b"\x01"),
        ("state", parts["state"].tobytes()[:-2]),
        ("state", b"\x81\xa1a\xa1x"),
        ("index", b"{}"),
        ("tensors", b"12"),
    ):
        with pytest.raises(CheckpointError, match="damaged"):
            read_state({**parts, name: memoryview(data)})


def test_states_of_older_releases_are_read() -> None:
    state = read_state({"parameters": memoryview(b""), "state": memoryview(pack_value({"m": torch.ones(3)}))})
    assert torch.equal(state["m"], torch.ones(3))

"""A model as one flat buffer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from taskmesh.errors import CheckpointError, ConfigurationError
from taskmesh.tensors import FlatLayout, FlatModel


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(tokens))  # type: ignore[no-any-return]


def with_norm() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_tied_parameters_lie_in_it_once_and_stay_tied() -> None:
    flat = FlatModel(Tied())
    assert flat.layout.parameter_count == 21
    assert not flat.layout.floats, "a buffer that is not in the state dict does not travel"
    flat.values.fill_(0.5)
    assert (
        flat.model.get_parameter("out.weight").data_ptr()
        == flat.model.get_parameter("embedding.weight").data_ptr()
    )
    assert bool((flat.model.get_parameter("embedding.weight") == 0.5).all())


def test_parameters_and_gradients_are_views() -> None:
    flat = FlatModel(with_norm())
    flat.zero_gradient()
    flat.model(torch.randn(5, 4)).sum().backward()
    gradient = flat.collect_gradient()
    expected = torch.cat([parameter.grad.reshape(-1) for parameter in flat.model.parameters()])  # type: ignore[union-attr]
    assert torch.equal(gradient, expected)
    for parameter in flat.model.parameters():
        assert parameter.untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()


def test_a_missing_gradient_counts_as_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    flat = FlatModel(model)
    flat.gradient.fill_(3.0)
    flat.zero_gradient()
    model["used"](torch.ones(1, 2)).sum().backward()
    assert flat.collect_gradient().tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_frozen_parameter_travels_and_has_no_gradient() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    flat = FlatModel(model)
    flat.zero_gradient()
    model(torch.ones(1, 2)).sum().backward()
    assert flat.layout.parameter_count == 3
    assert model.bias.grad is None
    assert flat.collect_gradient().tolist() == [1.0, 1.0, 0.0]


def test_bytes_bring_another_model_to_the_same_state_buffers_included() -> None:
    one, other = FlatModel(with_norm()), FlatModel(with_norm())
    one.model(torch.randn(9, 4))
    one.values[: one.layout.parameter_count].mul_(2)
    one.collect_buffers()
    data = bytes(one.view())
    other.load(data)
    for (name, value), (_, found) in zip(
        one.model.state_dict().items(), other.model.state_dict().items(), strict=True
    ):
        assert torch.equal(value, found), name
    assert int(other.model.get_buffer("1.num_batches_tracked")) == 1


def test_half_precision_workers_share_the_layout_of_an_fp32_master() -> None:
    master, worker = FlatModel(with_norm()), FlatModel(with_norm().to(torch.bfloat16))
    assert master.layout.digest == worker.layout.digest
    worker.load(bytes(master.view()))
    weight = worker.model.get_parameter("0.weight")
    assert weight.dtype is torch.bfloat16
    assert torch.equal(weight, master.model.get_parameter("0.weight").to(torch.bfloat16))
    worker.zero_gradient()
    worker.model(torch.ones(4, 4, dtype=torch.bfloat16)).sum().backward()
    assert worker.collect_gradient()[-1] == 4.0


def test_another_model_has_another_layout_and_other_bytes_are_refused() -> None:
    assert FlatLayout.of(nn.Linear(2, 3)).digest != FlatLayout.of(nn.Linear(3, 2)).digest
    flat = FlatModel(nn.Linear(2, 3))
    for size in (0, 35, 41, 80):
        with pytest.raises(CheckpointError):
            flat.load(bytes(size))


def test_fp64_parameters_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="float64"):
        FlatLayout.of(nn.Linear(2, 2).double())


def test_a_model_without_parameters() -> None:
    flat = FlatModel(nn.ReLU())
    flat.load(b"")
    assert flat.layout.size_bytes == 0

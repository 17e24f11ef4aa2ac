"""Arrays and tensors travel as raw bytes and arrive as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from taskmesh import arrays, codec, tensors
from taskmesh.errors import DecodeError

arrays.register()
tensors.register()
SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 3, 4)]
NUMPY_TYPES = ["f2", "f4", ">f4", "f8", "i1", "u1", "i8", "u8", "?", "c8", "m8[ns]", "M8[s]"]
TORCH_TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def round_trip(value: Any) -> Any:
    return codec.unpack_value(codec.pack_value(value))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_arrays_of_every_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    found = round_trip(value)
    assert isinstance(found, np.ndarray)
    assert found.dtype == value.dtype
    assert found.shape == shape
    assert found.tobytes() == value.tobytes()
    assert found.flags.writeable


@given(arrays_of.arrays(np.float32, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0)))
def test_any_fp32_array(value: np.ndarray[Any, Any]) -> None:
    assert round_trip(value).tobytes() == value.tobytes()


def test_a_strided_array_travels_in_c_order() -> None:
    value = np.arange(12.0).reshape(3, 4).T[::2]
    assert np.array_equal(round_trip(value), value)


def test_numpy_scalars_stay_scalars() -> None:
    found = round_trip({"share": np.float32(0.25)})["share"]
    assert isinstance(found, np.float32)
    assert found == np.float32(0.25)


@pytest.mark.parametrize("value", [np.array([object()]), np.zeros(2, "i4,f4"), np.array(["text"])])
def test_objects_records_and_texts_do_not_travel(value: np.ndarray[Any, Any]) -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        arrays.encode(value)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_tensors_of_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    found = round_trip(value)
    assert found.dtype == dtype
    assert found.shape == shape
    assert torch.equal(found, value)


def test_a_parameter_arrives_as_a_tensor_without_gradient() -> None:
    found = round_trip(torch.nn.Parameter(torch.ones(2, 2)))
    assert type(found) is torch.Tensor
    assert not found.requires_grad


def test_a_tensor_view_travels_alone() -> None:
    value = torch.arange(1000)[10:12]
    assert len(tensors.encode(value)) < 64
    assert torch.equal(round_trip(value), value)


@pytest.mark.parametrize("decode", [arrays.decode, tensors.decode])
@given(data=st.binary(max_size=64))
def test_garbage_is_refused(decode: Any, data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(b"\x01x" + data)


@pytest.mark.parametrize("module", [arrays, tensors])
def test_every_cut_and_a_lie_about_the_shape_are_refused(module: Any) -> None:
    value = np.ones((2, 3), "f4") if module is arrays else torch.ones(2, 3)
    data = module.encode(value)
    for end in range(len(data)):
        with pytest.raises(DecodeError):
            module.decode(data[:end])
    huge = arrays.pack_head(b"a", "<f4" if module is arrays else "float32", (2**62, 2**62)) + b"1234"
    with pytest.raises(DecodeError, match="takes"):
        module.decode(huge)

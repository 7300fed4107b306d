"""Torch's tensors as numpy arrays: the same values, without a copy."""

import numpy as np
import pytest

from jaxserve.weights import from_torch
from tests.oracles import torch


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3)])
def test_values_equal_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).mul(9).to(dtype)
    array = from_torch(tensor)
    assert array.dtype.name == str(tensor.dtype).removeprefix("torch.")
    np.testing.assert_array_equal(np.asarray(array, np.float32), tensor.float().numpy())
    if tensor.numel():
        assert array.ctypes.data == tensor.data_ptr()


def test_torch_views_and_parameters_are_converted() -> None:
    weight = torch.nn.Linear(3, 4, dtype=torch.bfloat16).weight
    np.testing.assert_array_equal(np.asarray(from_torch(weight.T), np.float32), weight.detach().float().numpy().T)


def test_other_values_are_unchanged() -> None:
    for value in (np.zeros(3), "text", None):
        assert from_torch(value) is value

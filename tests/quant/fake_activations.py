"""Emulated quantisation of activations, by torch: each returns the values that the products of a module see."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from tests.oracles import torch

Fake = Callable[[torch.Tensor, Mapping[str, np.ndarray]], torch.Tensor]


def fake_int8(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def fake_int8_zeros(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    if "input_scale" in tensors:
        scale, zero = (torch.tensor(tensors[f"input_{name}"]).float() for name in ("scale", "zero_point"))
    else:
        least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = (most - least) / 255
        zero = torch.round(torch.clamp(-128 - least / scale, -128, 127))
    return (torch.round(torch.clamp(x / scale + zero, -128, 127)) - zero) * scale


FAKE_INT8 = (fake_int8, fake_int8_zeros)  # the last bit of an input may decide on a whole step of all of a token


def fake_fp8(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    return to_fp8(x, x.abs().amax(-1, keepdim=True) / 448)


def fake_fp8_static(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    (scale,) = [tensor for name, tensor in tensors.items() if name in ("input_scale", "activation_scale")]
    return to_fp8(x, torch.tensor(scale.reshape(())))


def fake_fp8_groups(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    size = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -size % 128)).unflatten(-1, (-1, 128))
    return to_fp8(padded, padded.abs().amax(-1, keepdim=True) / 448).flatten(-2)[..., :size]


def fake_fp4(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
    if "input_scale" in tensors:
        factor = torch.tensor(np.float32(1) / tensors["input_scale"])
    else:
        factor = torch.tensor(tensors["input_global_scale"].reshape(()))
    groups = x.unflatten(-1, (-1, 16))
    scale = (factor * (groups.abs().amax(-1, keepdim=True) / 6)).clamp(max=448).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, 0.125, scale) / factor
    values = (groups / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (torch.tensor(values) * scale).flatten(-2)


def fake_mx(largest: float, dtype: type) -> Fake:
    """Return the quantisation to groups of an element's dtype, whose largest number is `largest`."""

    def fake(x: torch.Tensor, tensors: Mapping[str, np.ndarray]) -> torch.Tensor:
        groups = x.detach().unflatten(-1, (-1, 32)).numpy()
        mantissa, exponent = np.frexp(np.abs(groups).max(axis=-1, keepdims=True))
        scale = np.ldexp(np.float32(1), exponent + (mantissa >= 0.875) - np.frexp(largest)[1])
        values = np.clip(groups / scale, -largest, largest).astype(dtype).astype(np.float32)
        return torch.tensor(values * scale).flatten(-2)

    return fake


fake_mxfp4 = fake_mx(6, ml_dtypes.float4_e2m1fn)
fake_mxfp8 = fake_mx(448, ml_dtypes.float8_e4m3fn)


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x / scale, -448, 448).to(torch.float8_e4m3fn).float() * scale

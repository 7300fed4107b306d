"""compressed-tensors layout: names, dtypes and shapes of a matrix's tensors, and quantization_config."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve.tools.quantizer.grid import Grid
from jaxserve.tools.quantizer.scheme import BLOCK_SIZE, Scheme
from jaxserve.weights.rows import HEADS

_WORD_BITS = 32


def quantization_config(scheme: Scheme, grid: Grid, floats: Sequence[str] = ()) -> dict[str, Any]:
    """Return the config.json entry for the matrices in all layers; embedding and head are left out.

    Args:
        scheme: the checkpoint's scheme.
        grid: grid of the codes.
        floats: tensor names outside a multimodal model's text part, which are left out.
    """
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.is_float else "int",
        "symmetric": True,
        "strategy": "group" if scheme.in_groups else "block" if scheme.in_blocks else "channel",
        "dynamic": False,
    }
    if scheme.in_groups:
        weights["group_size"] = grid.columns
    if scheme.in_blocks:
        weights["block_structure"] = [grid.rows, grid.columns]
    inputs = None
    if scheme.activations is not None:
        inputs = {**{name: weights[name] for name in ("num_bits", "type", "symmetric")}, "dynamic": True}
        inputs["strategy"] = scheme.activations
        if scheme.activations == "group":
            inputs["group_size"] = BLOCK_SIZE
    group = {
        "targets": ["Linear"],
        "format": scheme.layout,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme.layout,
        "config_groups": {"group_0": group},
        "ignore": [*HEADS, *sorted({_part_pattern(name) for name in floats})],
        "kv_cache_scheme": None,
    }


def _part_pattern(name: str) -> str:
    """Return the pattern for all modules in the part that has this tensor."""
    return rf"re:(model\.)?{re.escape(name.removeprefix('model.').partition('.')[0])}\..*"


def stored_tensors(name: str, shape: tuple[int, int], scheme: Scheme, grid: Grid) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of a matrix's tensors by name.

    Args:
        name: the matrix's name in a checkpoint, `module.weight`.
        shape: shape [out, in].
        scheme: the checkpoint's scheme.
        grid: grid of the codes.
    """
    scale = jax.ShapeDtypeStruct(grid.scale_shape(shape), grid.scale_dtype)
    if scheme.layout != "pack-quantized":
        return {name: jax.ShapeDtypeStruct(shape, grid.code_dtype), f"{name}_scale": scale}
    num_words = -(-shape[1] * grid.bits // _WORD_BITS)
    return {
        f"{name}_packed": jax.ShapeDtypeStruct((shape[0], num_words), np.dtype(np.int32)),
        f"{name}_scale": scale,
        f"{name}_shape": jax.ShapeDtypeStruct((2,), np.dtype(np.int64)),
    }


def encode_tensors(
    name: str, codes: NDArray[Any], scale: NDArray[Any], scheme: Scheme, grid: Grid
) -> Mapping[str, NDArray[Any]]:
    """Return a matrix's tensors by name, as `stored_tensors` describes them, from its codes and scales."""
    scale = scale.astype(grid.scale_dtype)
    if scheme.layout != "pack-quantized":
        return {name: codes, f"{name}_scale": scale}
    shape = np.array(codes.shape, np.int64)
    return {f"{name}_packed": pack(codes, grid.bits), f"{name}_scale": scale, f"{name}_shape": shape}


def pack(codes: NDArray[np.int8], bits: int) -> NDArray[np.int32]:
    """Pack codes along each row into 32-bit words, offset to be unsigned, the first in the lowest bits."""
    per_word = _WORD_BITS // bits
    unsigned = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint32)
    unsigned = np.pad(unsigned, ((0, 0), (0, -codes.shape[1] % per_word)))
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    words = unsigned.reshape(len(codes), -1, per_word) << shifts
    return np.bitwise_or.reduce(words, axis=-1).view(np.int32)


def scale_dtype(checkpoint_dtype: str) -> np.dtype:
    """Return the numpy dtype for a checkpoint's dtype, in which its scales are stored."""
    return np.dtype(ml_dtypes.bfloat16) if checkpoint_dtype == "bfloat16" else np.dtype(checkpoint_dtype)

"""Writers of quantised matrices by numpy, in the layouts of the tools.

Each takes a matrix [O, I] in float32, and returns the tensors of a module and the matrix that they encode.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
# No width is a multiple of 128; on two or four devices, some groups of 16, 32 and 128 columns are cut.
SIZES = {"hidden_size": 160, "intermediate_size": 224, "head_dim": 40, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": False}

Tensors = dict[str, np.ndarray]
Writer = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]


def largest(w: np.ndarray, group: int, block_rows: int = 1) -> np.ndarray:
    """Return the largest absolute value of each block, [ceil(O / rows), ceil(I / group)]."""
    padded = np.pad(np.abs(w), ((0, -w.shape[0] % block_rows), (0, -w.shape[1] % group)))
    return padded.reshape(padded.shape[0] // block_rows, block_rows, -1, group).max(axis=(1, 3))


def spread(grid: np.ndarray, w: np.ndarray, group: int, block_rows: int = 1) -> np.ndarray:
    whole = np.repeat(np.repeat(grid, group, axis=1), block_rows, axis=0)
    return whole[: w.shape[0], : w.shape[1]]


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned numbers along the last axis into int32, the first in the lowest bits."""
    per_word = 32 // bits
    grouped = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, per_word)
    shifted = grouped << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))
    return shifted.sum(axis=-1, dtype=np.uint64).astype(np.uint32).view(np.int32)


def write_fp8(
    by: str,
    scale_name: str = "weight_scale",
    *,
    static: tuple[int, ...] | None = None,
    input_name: str = "input_scale",
) -> Writer:
    """Return a writer; `static` is the shape of the scales of a tensor and of its activations."""

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        group, rows = {"tensor": (w.shape[1], w.shape[0]), "channel": (w.shape[1], 1), "block": (128, 128)}[by]
        scale = (largest(w, group, rows) / 448).astype(np.float32)
        wide = spread(scale, w, group, rows)
        q = (w / wide).astype(E4M3)
        tensors = {"weight": q, scale_name: scale if static is None else scale.reshape(static)}
        tensors |= {} if static is None else {input_name: np.full(static, 0.011, np.float32)}
        return tensors, q.astype(np.float32) * wide

    return write


def write_fp8_blocks(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """Write ModelOpt's blocks, whose scales are [rows, 1, columns, 1]."""
    tensors, values = write_fp8("block")(w, rng)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None]}, values


def write_fp8_rows(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """Write ModelOpt's scales of rows, a vector."""
    tensors, values = write_fp8("channel")(w, rng)
    return tensors | {"weight_scale": tensors["weight_scale"][:, 0]}, values


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def write_fp4(tool: str, *, static: bool = True) -> Writer:
    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        factor = np.float32(448 * 6 / 3.0)  # factor of all modules, as parts are fused
        own = (factor * (largest(w, 16) / np.float32(6))).astype(E4M3)
        second = np.float32(1) / factor
        wide = own.astype(np.float32)
        scale = wide * second if tool == "modelopt" else wide / factor
        codes = e2m1_codes(w / spread(scale, w, 16))
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        if tool == "modelopt":
            names = {"weight": packed, "weight_scale": own, "weight_scale_2": second.reshape(())}
            names |= {"input_scale": np.float32(1 / 500).reshape(())} if static else {}
        else:
            names = {"weight_packed": packed, "weight_scale": own, "weight_global_scale": factor.reshape(1)}
            names |= {"input_global_scale": np.float32([500])} if static else {}
        return names, values * spread(scale, w, 16)

    return write


def write_mxfp4(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    exponent = np.floor(np.log2(largest(w, 32))) - 2 + 127
    scale = spread(2.0 ** (exponent - 127), w, 32).astype(np.float32)
    codes = e2m1_codes(w / scale)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": exponent.astype(np.uint8)}, values * scale


def write_mxfp8(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    exponent = np.floor(np.log2(largest(w, 32))) - 8 + 127
    scale = spread(2.0 ** (exponent - 127), w, 32).astype(np.float32)
    q = np.clip(w / scale, -448, 448).astype(E4M3)
    return {"weight": q, "weight_scale": exponent.astype(np.uint8)}, q.astype(np.float32) * scale


def integers(
    w: np.ndarray, bits: int, group: int, *, symmetric: bool, low: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unsigned codes [O, I], zero points and scales [O, groups]; zero points are at least `low`."""
    top, padded = 2**bits - 1, np.pad(w, ((0, 0), (0, -w.shape[1] % group)))
    groups = padded.reshape(len(w), -1, group)
    if symmetric:
        scale = np.abs(groups).max(-1) / (top / 2)
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        least, most = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = (most - least) / top
        zero = np.clip(np.round(-least / scale), low, top).astype(int)
    scale = scale.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(groups / scale[..., None]) + zero[..., None], 0, top)
    codes = codes.reshape(padded.shape)[:, : w.shape[1]]
    return codes.astype(np.uint32), zero.astype(np.uint32), scale


def write_ints(
    bits: int, group: int, *, symmetric: bool = True, form: str = "pack-quantized", static: bool = False
) -> Writer:
    """Return a writer; `static` activations have scale and zero point."""

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        size = w.shape[1] if group == -1 else group
        codes, zero, scale = integers(w, bits, size, symmetric=symmetric)
        inputs = {"input_scale": np.float32([0.02]), "input_zero_point": np.int8([-9])} if static else {}
        values = (codes.astype(np.float32) - spread(zero, w, size).astype(np.float32)) * spread(scale, w, size)
        if form == "int-quantized":
            signed = (codes.astype(int) - 2 ** (bits - 1)).astype(np.int8)
            return {"weight": signed, "weight_scale": scale, **inputs}, values
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scale}
        tensors["weight_shape"] = np.array(w.shape, np.int64)
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        return tensors, values

    return write


def write_ints_ordered(group: int, *, symmetric: bool = True) -> Writer:
    """Return the writer of old versions of compressed-tensors for groups of columns in activation order."""

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        order = np.random.default_rng(w.shape[1]).permutation(w.shape[1])
        back = np.argsort(order)
        tensors, values = write_ints(4, group, symmetric=symmetric)(w[:, order], rng)
        codes = tensors["weight_packed"].view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        tensors["weight_packed"] = words(codes.reshape(w.shape)[:, back], 4)
        return tensors | {"weight_g_idx": (back // group).astype(np.int32)}, values[:, back]

    return write


def write_gptq(bits: int, group: int, *, version: int = 1, symmetric: bool = True, act_order: bool = False) -> Writer:
    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        size = w.shape[1] if group == -1 else group
        # The order is a function of the inputs, so that it is one for the parts of a fused product.
        order = np.random.default_rng(w.shape[1]).permutation(w.shape[1]) if act_order else np.arange(w.shape[1])
        codes, zero, scale = integers(w[:, order], bits, size, symmetric=symmetric)
        q = codes.astype(np.float32) - spread(zero, w, size).astype(np.float32)
        group_of, values, stored = np.empty(w.shape[1], np.int32), np.empty_like(w), np.empty_like(codes)
        group_of[order] = np.arange(w.shape[1]) // size
        values[:, order], stored[:, order] = q * spread(scale, w, size), codes
        zeros = words(zero.T, bits).view(np.uint32)
        if version == 1:
            zeros = zeros - words(np.ones_like(zero.T), bits).view(np.uint32)
        return {
            "qweight": np.ascontiguousarray(words(stored.astype(np.uint32), bits).T),
            "qzeros": zeros.view(np.int32),
            "scales": np.ascontiguousarray(scale.T).astype(np.float16),
            "g_idx": group_of,
            "bias": np.zeros(len(w), np.float16),
        }, values

    return write


def write_awq(group: int) -> Writer:
    def mixed(codes: np.ndarray) -> np.ndarray:
        taken = codes.reshape(len(codes), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(taken.reshape(codes.shape), 4)

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        codes, zero, scale = integers(w, 4, group, symmetric=False)
        values = (codes.astype(np.float32) - spread(zero, w, group).astype(np.float32)) * spread(scale, w, group)
        scales = np.ascontiguousarray(scale.T).astype(np.float16)
        return {"qweight": mixed(codes.T), "qzeros": mixed(zero.T), "scales": scales}, values

    return write


def write_row_nibbles(group: int) -> Writer:
    """Return ModelOpt's writer of W4A16_AWQ, whose factors of inputs are in the norm before but in down projections."""

    def write(w: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        factor = np.random.default_rng(w.shape[1]).uniform(0.5, 2, w.shape[1]).astype(np.float32)
        factor = np.ones_like(factor) if w.shape[1] == SIZES["hidden_size"] else factor
        scale = (largest(w / factor, group) / 7).astype(np.float32)
        signed = np.clip(np.round(w / factor / spread(scale, w, group)), -8, 7).astype(np.int8)
        codes = signed.view(np.uint8) & 15
        tensors = {"weight": codes[::2] | codes[1::2] << 4, "weight_scale": scale}
        tensors |= {} if (factor == 1).all() else {"pre_quant_scale": factor}
        return tensors, signed * spread(scale, w, group) * factor

    return write

"""Conversion from stored matrix elements to 16-bit floats in registers, in the layout that wgmma reads.

A thread loads four bytes from adjacent columns, but wgmma wants two bytes there and two bytes eight columns further:
two adjacent threads exchange halves. Conversions are exact and convert two elements at a time by bit operations. The
interpreter, which has no registers, uses plain conversions instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Shaped

from jaxserve.pallas_kernels.elements import PACKED, e2m1_floats
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.quantized_matmul import WGMMA_COLUMNS

BIAS = {"bfloat16": 128, "float16": 1024}  # added to int4 codes: a float whose last bits are the code
# Register layouts of `[64, columns]`: for bytes as loaded, and for 16-bit floats as wgmma reads them.
LOADED, WANTED = plgpu.Layout.WGMMA_UPCAST_2X, plgpu.Layout.WGMMA
_COLUMNS = 16  # columns per instruction


def exchanged(stored: Shaped[Array, "out columns"], kind: str, interpret: Any) -> Shaped[Array, "out columns"]:
    """Exchange bytes between adjacent threads, so that each has the columns that wgmma reads from it; see `floats`.

    Args:
        stored: stored matrix bytes in registers, in the layout `LOADED`.
        kind: element type, such as "int4".
        interpret: parameters for the interpreter, which leaves the bytes as they are; None on a GPU.
    """
    if interpret is not None:
        return stored
    # An even thread gets columns 0, 1, 8 and 9; packed columns 0 and 1 are kept apart.
    even, odd = (0x5140, 0x3726) if kind in PACKED else (0x5410, 0x3276)

    @plgpu.inline_mgpu(arg_types=(LOADED,), return_type=plgpu.ShapeDtypeStruct(stored.shape, jnp.uint8, layout=LOADED))
    def exchange(_: Any, x: Any) -> Any:
        is_even = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(utils.thread_idx(), _i32(2)), _i32(0))
        order, registers = arith.select(is_even, _i32(even), _i32(odd)), np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            own = utils.bitcast(register, _i32_type())
            blended = utils.prmt(own, utils.shfl_bfly(own, 1), order)
            registers[index] = utils.bitcast(blended, ir.VectorType.get((4,), ir.IntegerType.get_signless(8)))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=False)

    bytes_: Array = exchange(stored)
    return bytes_


def floats(
    elements: Shaped[Array, "out columns"], kind: str, dtype: jnp.dtype, part: int, unit: int, interpret: Any
) -> Shaped[Array, "out 64"]:
    """Convert 64 columns of stored elements to floats in the layout `WANTED`; int4 codes get `BIAS` added.

    Args:
        elements: bytes that `exchanged` returned, in registers.
        kind: element type, such as "int4".
        dtype: result dtype, bfloat16 or float16.
        part: element in each byte to convert: 0 for the low bits or the only element, 1 for the high bits.
        unit: the 64 columns' index in the block.
        interpret: parameters for the interpreter; None on a GPU.
    """
    if interpret is not None:
        return _interpreted(elements[:, unit * WGMMA_COLUMNS : (unit + 1) * WGMMA_COLUMNS], kind, dtype, part)
    shape = elements.shape[0], WGMMA_COLUMNS
    codes = [f"{{ .reg .b32 a, b; {_code(kind, dtype.name, part, half)} }}" for half in range(2)]

    @plgpu.inline_mgpu(arg_types=(LOADED,), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=WANTED))
    def convert_unit(_: Any, x: Any) -> Any:
        tiles, pair_type = WGMMA_COLUMNS // _COLUMNS, ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        registers = np.empty(WANTED.to_mgpu().registers_shape(shape), dtype=object)
        for index, register in np.ndenumerate(x.registers[:, unit * tiles : (unit + 1) * tiles]):
            bits = utils.bitcast(register, _i32_type())
            for half, code in enumerate(codes):
                pair: Any = llvm.inline_asm(_i32_type(), [bits], code, "=r,r")
                registers[(index[0], 2 * index[1] + half, *index[2:-1])] = utils.bitcast(pair, pair_type)
        return mgpu.FragmentedArray(_registers=registers, _layout=WANTED.to_mgpu(), _is_signed=None)

    unit_floats: Array = convert_unit(elements)
    return unit_floats


def joined(groups: Sequence[Shaped[Array, "out 64"]], interpret: Any) -> Shaped[Array, "out 64"]:
    """Concatenate the first `64 / len(groups)` columns of each array along the columns.

    Args:
        groups: arrays in registers, in the layout `WANTED`: each has one scale group's value in all columns.
        interpret: parameters for the interpreter; None on a GPU.
    """
    size = WGMMA_COLUMNS // len(groups)
    if len(groups) == 1:
        return groups[0]
    if interpret is not None:
        return jnp.concatenate([group[:, :size] for group in groups], axis=1)
    shape, dtype = groups[0].shape, groups[0].dtype

    @plgpu.inline_mgpu(
        arg_types=(WANTED,) * len(groups), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=WANTED)
    )
    def join(_: Any, *arrays: Any) -> Any:
        registers = np.empty_like(arrays[0].registers)
        for column in range(registers.shape[1]):  # a register column is eight columns
            registers[:, column] = arrays[column * 8 // size].registers[:, column]
        return mgpu.FragmentedArray(_registers=registers, _layout=arrays[0].layout, _is_signed=None)

    together: Array = join(*groups)
    return together


def _interpreted(stored: Shaped[Array, "out 64"], kind: str, dtype: jnp.dtype, part: int) -> Shaped[Array, "out 64"]:
    """Convert stored elements to floats as `floats` does, by plain conversions for the interpreter."""
    if kind not in PACKED:
        return stored.astype(jnp.float32).astype(dtype)
    codes = stored.astype(jnp.int32)
    codes = codes & 15 if part == 0 else lax.shift_right_logical(codes, jnp.full_like(codes, 4)) & 15
    return (e2m1_floats(codes) if kind == "e2m1" else codes + BIAS[dtype.name]).astype(dtype)


def _code(kind: str, dtype: str, part: int, half: int) -> str:
    """Return PTX that converts two elements from the 32-bit register $1 to two 16-bit floats in register $0.

    Args:
        kind: element type, such as "int4".
        dtype: "bfloat16" or "float16".
        part: element in each byte: 0 for the low bits or the only element, 1 for the high bits.
        half: pair of bytes to convert, 0 or 1: the register has two pairs.
    """
    shift = 8 * half + 4 * part  # from the pair's codes to the last bits in both register halves
    is_wide, floats = dtype == "bfloat16", "bf16x2" if dtype == "bfloat16" else "f16x2"
    match kind:
        case "int4":
            bias = 0x43004300 if is_wide else 0x64006400
            return f"shr.u32 a, $1, {shift}; lop3.b32 $0, a, 0x000F000F, {bias:#x}, 0xEA;"
        case "e2m1":
            # Exponent and mantissa bits, shifted into place, are the value except for a factor; 0.5 is subnormal.
            last, mask, factor = (6, 0x01C001C0, 0x7E807E80) if is_wide else (9, 0x0E000E00, 0x74007400)
            move = f"shl.b32 a, $1, {last - shift};" if last >= shift else f"shr.u32 a, $1, {shift - last};"
            sign = f"shl.b32 b, $1, {12 - shift}; and.b32 a, a, {mask:#x}; lop3.b32 a, b, 0x80008000, a, 0xEA;"
            return f"{move} {sign} mov.b32 b, {factor:#x}; mul.{floats} $0, a, b;"
        case "int8" if is_wide:
            # 128 plus the last seven bits, minus 128, or minus 256 if the sign increments the exponent.
            spread = f"prmt.b32 a, $1, 0x43, {0x4342 if half else 0x4140:#x};"
            return f"{spread} and.b32 b, a, 0xFF7FFF7F; and.b32 a, a, 0xFF80FF80; sub.bf16x2 $0, b, a;"
        case "int8":
            spread = f"xor.b32 a, $1, 0x80808080; prmt.b32 a, a, 0x64, {0x4342 if half else 0x4140:#x};"
            return f"{spread} mov.b32 b, 0x64806480; sub.f16x2 $0, a, b;"  # 1024 + 128
        case "e4m3":
            pair, other = ("_", "low") if half else ("low", "_")
            halves = f".reg .b16 low, high; .reg .f32 x, y; mov.b32 {{{pair}, {other}}}, $1;"
            if not is_wide:
                return f"{halves} cvt.rn.f16x2.e4m3x2 $0, low;"
            floats = "cvt.f32.f16 x, low; cvt.f32.f16 y, high; cvt.rn.bf16x2.f32 $0, y, x;"
            return f"{halves} cvt.rn.f16x2.e4m3x2 a, low; mov.b32 {{low, high}}, a; {floats}"
    raise ValueError(f"there is no conversion of {kind}")


def _i32_type() -> Any:
    """Return the MLIR type i32."""
    return ir.IntegerType.get_signless(32)


def _i32(x: int) -> Any:
    """Return an MLIR constant of type i32."""
    return utils.c(x, _i32_type())

"""GGUF's quantised blocks, decoded to elements, scales and minima when they are read.

A matrix row is a sequence of blocks, each with the values and scales for 32 or 256 columns:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.mapped_array import read
from jaxserve.weights.quantized.packing import packed_pairs
from jaxserve.weights.quantized.scheme import Role
from jaxserve.weights.stored_tensor import MatrixPart

Bytes = NDArray[np.uint8]


class Field(NamedTuple):
    """The part of a block with one role.

    Attributes:
        width: number of values per block.
        dtype: value dtype.
        decode: function from blocks [rows, blocks, bytes] to values [rows, blocks, width].
    """

    width: int
    dtype: np.dtype
    decode: Callable[[Bytes], NDArray[Any]]


class BlockType(NamedTuple):
    """A quantised type.

    Attributes:
        num_columns: columns per block.
        num_bytes: bytes per block.
        fields: block content by role; 4-bit elements are pairs, the lower column in the low bits.
    """

    num_columns: int
    num_bytes: int
    fields: Mapping[Role, Field]


def _bit_fields(packed: Bytes, width: int, run: int) -> Bytes:
    """Return all `width`-bit values in bytes [rows, blocks, bytes].

    For each `run` bytes the lowest bits in every byte come first, then the next ones.
    """
    groups = packed.reshape(*packed.shape[:2], -1, 1, run)
    values: Bytes = groups >> np.arange(0, 8, width, dtype=np.uint8)[:, None] & np.uint8((1 << width) - 1)
    return values.reshape(*packed.shape[:2], -1)


def _float16(blocks: Bytes, start: int) -> NDArray[np.float32]:
    """Return the float16 at byte `start` in each block, as float32."""
    return blocks[..., start : start + 2].view(np.float16).astype(np.float32)


def _five_bits(blocks: Bytes, start: int) -> NDArray[np.int8]:
    """Return Q5_0's or Q5_1's elements, 0 to 31.

    From byte `start` on, 4 bytes hold the elements' highest bits and 16 the low four.
    """
    high = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    return (_bit_fields(blocks[..., start + 4 :], 4, 16) | high << np.uint8(4)).view(np.int8)


def _q2_k_grid(blocks: Bytes, *, minima: bool) -> NDArray[np.float32]:
    """Return Q2_K's scales or minima: four bits times the first or second float16 after the elements."""
    fours = blocks[..., :16] >> np.uint8(4) if minima else blocks[..., :16] & np.uint8(15)
    return fours.astype(np.float32) * _float16(blocks, 82 if minima else 80)


def _q3_k_elements(blocks: Bytes) -> Bytes:
    """Return Q3_K's element pairs, from -4 to 3 plus 8; the first 32 bytes hold the third bits."""
    third = _bit_fields(blocks[..., :32], 1, 32) << np.uint8(2)
    return packed_pairs(_bit_fields(blocks[..., 32:96], 2, 32) + third + np.uint8(4))


def _q3_k_scale(blocks: Bytes) -> NDArray[np.float32]:
    """Return Q3_K's scales: six bits, less 32, times the last float16; bytes with the low four bits come first."""
    sixes = _bit_fields(blocks[..., 96:104], 4, 8) | _bit_fields(blocks[..., 104:108], 2, 4) << np.uint8(4)
    return (sixes.astype(np.float32) - np.float32(32)) * _float16(blocks, 108)


def _q5_k_elements(blocks: Bytes) -> NDArray[np.int8]:
    """Return Q5_K's elements, 0 to 31: bytes 16 to 47 hold the highest bits, the rest the low four."""
    high = _bit_fields(blocks[..., 16:48], 1, 32)
    return (_bit_fields(blocks[..., 48:], 4, 32) | high << np.uint8(4)).view(np.int8)


def _k_grid(blocks: Bytes, *, minima: bool) -> NDArray[np.float32]:
    """Return Q4_K's or Q5_K's scales or minima: six bits times the first or second float16 in a block."""
    scales, mins, rest = (blocks[..., start : start + 4] for start in (4, 8, 12))
    first, low = (mins, rest >> np.uint8(4)) if minima else (scales, rest & np.uint8(15))
    sixes = np.concatenate([first & np.uint8(63), low | first >> np.uint8(2) & np.uint8(48)], axis=-1)
    return sixes.astype(np.float32) * _float16(blocks, 2 if minima else 0)


def _q6_k_elements(blocks: Bytes) -> NDArray[np.int8]:
    """Return Q6_K's elements; for each 128 columns, 64 bytes hold the low four bits and 32 the high two."""
    high = _bit_fields(blocks[..., 128:192], 2, 32)
    return (_bit_fields(blocks[..., :128], 4, 64) | high << np.uint8(4)).view(np.int8) - np.int8(32)


def _q6_k_scale(blocks: Bytes) -> NDArray[np.float32]:
    """Return Q6_K's scales: 16 signed bytes times the last float16."""
    return blocks[..., 192:208].view(np.int8).astype(np.float32) * _float16(blocks, 208)


def _int8(width: int, decode: Callable[[Bytes], NDArray[Any]]) -> Field:
    """Return the field for `width` eight-bit elements per block."""
    return Field(width, np.dtype(np.int8), decode)


def _int4(num_columns: int, decode: Callable[[Bytes], NDArray[Any]]) -> Field:
    """Return the field for pairs of four-bit elements in `num_columns` columns per block."""
    return Field(num_columns // 2, np.dtype(np.uint8), decode)


def _float32(width: int, decode: Callable[[Bytes], NDArray[Any]]) -> Field:
    """Return the field for `width` scales or minima per block."""
    return Field(width, np.dtype(np.float32), decode)


_SCALE: Mapping[Role, Field] = {
    "scale": Field(1, np.dtype(np.float16), lambda blocks: blocks[..., :2].view(np.float16)),
}
_SCALE_AND_MINIMUM: Mapping[Role, Field] = {  # blocks store the minimum as an addend, which schemes subtract
    "scale": _float32(1, lambda blocks: _float16(blocks, 0)),
    "minimum": _float32(1, lambda blocks: -_float16(blocks, 2)),
}
_K_GRIDS: Mapping[Role, Field] = {
    "scale": _float32(8, partial(_k_grid, minima=False)),
    "minimum": _float32(8, partial(_k_grid, minima=True)),
}
_Q2_K_GRIDS: Mapping[Role, Field] = {
    "scale": _float32(16, partial(_q2_k_grid, minima=False)),
    "minimum": _float32(16, partial(_q2_k_grid, minima=True)),
}
_Q3_K_SCALE: Mapping[Role, Field] = {"scale": _float32(16, _q3_k_scale)}
_Q6_K_SCALE: Mapping[Role, Field] = {"scale": _float32(16, _q6_k_scale)}
_ELEMENTS = {
    "Q8_0": _int8(32, lambda blocks: blocks[..., 2:].view(np.int8)),
    "Q4_0": _int4(32, lambda blocks: packed_pairs(_bit_fields(blocks[..., 2:], 4, 16))),
    "Q5_0": _int8(32, lambda blocks: _five_bits(blocks, 2) - np.int8(16)),
    "Q4_1": _int4(32, lambda blocks: packed_pairs(_bit_fields(blocks[..., 4:], 4, 16))),
    "Q5_1": _int8(32, lambda blocks: _five_bits(blocks, 4)),
    "Q2_K": _int4(256, lambda blocks: packed_pairs(_bit_fields(blocks[..., 16:80], 2, 32))),
    "Q3_K": _int4(256, _q3_k_elements),
    "Q4_K": _int4(256, lambda blocks: packed_pairs(_bit_fields(blocks[..., 16:], 4, 32))),
    "Q5_K": _int8(256, _q5_k_elements),
    "Q6_K": _int8(256, _q6_k_elements),
}
BLOCK_TYPES: Mapping[str, BlockType] = {
    name: BlockType(num_columns, num_bytes, {"elements": _ELEMENTS[name], **grids})
    for name, num_columns, num_bytes, grids in (
        ("Q8_0", 32, 34, _SCALE),
        ("Q4_0", 32, 18, _SCALE),
        ("Q5_0", 32, 22, _SCALE),
        ("Q4_1", 32, 20, _SCALE_AND_MINIMUM),
        ("Q5_1", 32, 24, _SCALE_AND_MINIMUM),
        ("Q2_K", 256, 84, _Q2_K_GRIDS),
        ("Q3_K", 256, 110, _Q3_K_SCALE),
        ("Q4_K", 256, 144, _K_GRIDS),
        ("Q5_K", 256, 176, _K_GRIDS),
        ("Q6_K", 256, 210, _Q6_K_SCALE),
    )
}


@dataclass(frozen=True)
class BlockTensor(MatrixPart):
    """Values with one role in some rows and columns of a block matrix, still unread.

    Attributes:
        blocks: all blocks in the matrix, [rows, blocks, bytes], mapped from the file.
        field: the role's part of a block.
        head_size: rows per head if the file alternates rows from a head's halves; None if rows are in order.
    """

    blocks: Bytes
    field: Field
    head_size: int | None

    @classmethod
    def from_blocks(cls, blocks: Bytes, field: Field, head_size: int | None = None) -> "BlockTensor":
        """Return all rows and columns."""
        num_rows, num_blocks, _ = blocks.shape
        return cls((0, num_rows), (0, num_blocks * field.width), blocks, field, head_size)

    @property
    def dtype(self) -> np.dtype:
        return self.field.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if not prod(self.shape):
            return np.empty(self.shape, dtype or self.dtype)
        (start, stop), head = self.rows, self.head_size or 1
        low, high = start - start % head, stop + -stop % head  # heads are read whole
        first, last = self.columns[0] // self.field.width, -(-self.columns[1] // self.field.width)
        taken = read(self.blocks[low:high, first:last])
        if self.head_size is not None:
            taken = taken[alternating(np.arange(start, stop), self.head_size) - low]
        values = np.ascontiguousarray(self.field.decode(taken)).reshape(stop - start, -1)
        skipped = first * self.field.width
        return values[:, self.columns[0] - skipped : self.columns[1] - skipped].astype(dtype or self.dtype, copy=False)


def alternating(rows: NDArray[np.int64], head_size: int) -> NDArray[np.int64]:
    """Return the stored indices for query or key rows if the file interleaves the two halves of each head."""
    head, row = np.divmod(rows, head_size)
    half, index = np.divmod(row, head_size // 2)
    return head * head_size + 2 * index + half

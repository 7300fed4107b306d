"""Blocks of GGUF's quantised types, decoded to elements, scales and minima as they are read.

A row of a matrix is a sequence of blocks, each with the values of 32 or 256 columns and all their scales:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.quantized.scheme import Role
from jaxserve.weights.safetensors_file import release
from jaxserve.weights.stored_tensor import HeldTensor

Bytes = NDArray[np.uint8]


class Field(NamedTuple):
    """Part of a block that has one role.

    Attributes:
        width: number of values per block.
        dtype: dtype of the values.
        decode: function of blocks [rows, blocks, bytes] that returns values [rows, blocks, width], or of as many sizes.
    """

    width: int
    dtype: np.dtype
    decode: Callable[[Bytes], NDArray[Any]]


class BlockType(NamedTuple):
    """A quantised type.

    Attributes:
        num_columns: columns of a block.
        num_bytes: bytes of a block.
        fields: content of a block by role; elements of four bits are pairs, the lower column in the low bits.
    """

    num_columns: int
    num_bytes: int
    fields: Mapping[Role, Field]


_INT8, _UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
_FLOAT16, _FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
_HALF_SCALE = Field(1, _FLOAT16, lambda blocks: blocks[..., :2].view(np.float16))  # the beginning of some types


def _pairs(codes: Bytes) -> Bytes:
    pairs: Bytes = codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
    return pairs


def _halves(packed: Bytes) -> Bytes:
    """Return the low four bits of all bytes of the last axis, then the high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _fives(rest: Bytes) -> NDArray[np.int8]:
    """Return elements from 0 to 31; 4 and 16 bytes hold the fifth bits and the low four of 32 columns."""
    fifth = np.unpackbits(rest[..., :4], axis=-1, bitorder="little")
    return (_halves(rest[..., 4:]) | fifth << np.uint8(4)).view(np.int8)


def _negative_minimum(blocks: Bytes) -> NDArray[np.float32]:
    """Return the second float16 of a block, which is added to products, as one that is subtracted."""
    return -blocks[..., 2:4].view(np.float16).astype(np.float32)


def _wide_scale(blocks: Bytes) -> NDArray[np.float32]:
    return blocks[..., :2].view(np.float16).astype(np.float32)


def _quarters(packed: Bytes) -> Bytes:
    """Return 128 values of two bits for each 32 bytes of the last axis, the lowest bits of all 32 first."""
    groups = packed.reshape(*packed.shape[:2], -1, 1, 32)
    values: Bytes = groups >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return values.reshape(*packed.shape[:2], -1)


def _q2_k_grid(blocks: Bytes, *, minima: bool) -> NDArray[np.float32]:
    """Return the multiples of 4 bits, of the first or second float16 after the elements, that are scales or minima."""
    fours = blocks[..., :16] >> np.uint8(4) if minima else blocks[..., :16] & np.uint8(15)
    unit = blocks[..., 82:84] if minima else blocks[..., 80:82]
    return fours.astype(np.float32) * unit.view(np.float16).astype(np.float32)


def _q3_k_elements(blocks: Bytes) -> Bytes:
    """Return pairs of elements from -4 to 3, 8 more in four bits; 32 bytes hold a third bit for each group's column."""
    third = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    third = third.reshape(*blocks.shape[:2], 256) << np.uint8(2)
    return _pairs(_quarters(blocks[..., 32:96]) + third + np.uint8(4))


def _q3_k_scale(blocks: Bytes) -> NDArray[np.float32]:
    """Return the multiples of 6 bits, less 32, of the last float16: the low four bits of all in front of the others."""
    high = blocks[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    sixes = _halves(blocks[..., 96:104]) | high.reshape(*blocks.shape[:2], 16) << np.uint8(4)
    return (sixes.astype(np.float32) - np.float32(32)) * blocks[..., 108:110].view(np.float16).astype(np.float32)


def _q4_k_elements(blocks: Bytes) -> Bytes:
    """Return pairs; each 32 bytes hold a group of 32 columns in their low bits and the next one in their high bits."""
    return _pairs(_halves(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)))


def _q5_k_elements(blocks: Bytes) -> NDArray[np.int8]:
    """Return elements from 0 to 31: low bits as Q4_K's, behind 32 bytes with a fifth bit for each group's column."""
    groups = (*blocks.shape[:2], 8, 32)
    low = _halves(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(groups)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return (low | fifth << np.uint8(4)).view(np.int8)


def _k_sixes(blocks: Bytes, *, minima: bool) -> NDArray[np.float32]:
    """Return the multiples of 6 bits, of the first or second float16 of a block, that are its scales or minima."""
    scales, mins, rest = (blocks[..., start : start + 4] for start in (4, 8, 12))
    own, low = (mins, rest >> np.uint8(4)) if minima else (scales, rest & np.uint8(15))
    sixes = np.concatenate([own & np.uint8(63), low | own >> np.uint8(2) & np.uint8(48)], axis=-1)
    unit = blocks[..., 2:4] if minima else blocks[..., :2]
    return sixes.astype(np.float32) * unit.view(np.float16).astype(np.float32)


def _q6_k_elements(blocks: Bytes) -> NDArray[np.int8]:
    """Return elements; 64 and 32 bytes hold the low four and the high two bits of 128 columns."""
    outer = (*blocks.shape[:2], 2)
    low = _halves(blocks[..., :128].reshape(*outer, 64))
    high = blocks[..., 128:192].reshape(*outer, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return (low | high.reshape(*outer, 128) << np.uint8(4)).view(np.int8) - np.int8(32)


def _q6_k_scale(blocks: Bytes) -> NDArray[np.float32]:
    unit = blocks[..., 208:].view(np.float16).astype(np.float32)
    return blocks[..., 192:208].view(np.int8).astype(np.float32) * unit


_K_GRIDS: Mapping[Role, Field] = {
    "scale": Field(8, _FLOAT32, lambda blocks: _k_sixes(blocks, minima=False)),
    "minimum": Field(8, _FLOAT32, lambda blocks: _k_sixes(blocks, minima=True)),
}
BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q8_0": BlockType(
        32, 34, {"elements": Field(32, _INT8, lambda blocks: blocks[..., 2:].view(np.int8)), "scale": _HALF_SCALE}
    ),
    "Q4_0": BlockType(
        32, 18, {"elements": Field(16, _UINT8, lambda blocks: _pairs(_halves(blocks[..., 2:]))), "scale": _HALF_SCALE}
    ),
    "Q5_0": BlockType(
        32,
        22,
        {"elements": Field(32, _INT8, lambda blocks: _fives(blocks[..., 2:]) - np.int8(16)), "scale": _HALF_SCALE},
    ),
    "Q4_1": BlockType(
        32,
        20,
        {
            "elements": Field(16, _UINT8, lambda blocks: _pairs(_halves(blocks[..., 4:]))),
            "scale": Field(1, _FLOAT32, _wide_scale),
            "minimum": Field(1, _FLOAT32, _negative_minimum),
        },
    ),
    "Q5_1": BlockType(
        32,
        24,
        {
            "elements": Field(32, _INT8, lambda blocks: _fives(blocks[..., 4:])),
            "scale": Field(1, _FLOAT32, _wide_scale),
            "minimum": Field(1, _FLOAT32, _negative_minimum),
        },
    ),
    "Q2_K": BlockType(
        256,
        84,
        {
            "elements": Field(128, _UINT8, lambda blocks: _pairs(_quarters(blocks[..., 16:80]))),
            "scale": Field(16, _FLOAT32, lambda blocks: _q2_k_grid(blocks, minima=False)),
            "minimum": Field(16, _FLOAT32, lambda blocks: _q2_k_grid(blocks, minima=True)),
        },
    ),
    "Q3_K": BlockType(
        256, 110, {"elements": Field(128, _UINT8, _q3_k_elements), "scale": Field(16, _FLOAT32, _q3_k_scale)}
    ),
    "Q4_K": BlockType(
        256,
        144,
        {"elements": Field(128, _UINT8, _q4_k_elements), **_K_GRIDS},
    ),
    "Q5_K": BlockType(256, 176, {"elements": Field(256, _INT8, _q5_k_elements), **_K_GRIDS}),
    "Q6_K": BlockType(
        256, 210, {"elements": Field(256, _INT8, _q6_k_elements), "scale": Field(16, _FLOAT32, _q6_k_scale)}
    ),
}


@dataclass(frozen=True)
class BlockTensor:
    """Some rows and columns of what the blocks of a matrix hold of one role, still unread.

    Attributes:
        blocks: all blocks of the matrix, [rows, blocks, bytes], a view of a mapped file.
        field: the role's part of a block.
        head_size: rows of a head, in which rows of its first and second half alternate; None if rows are in order.
        rows: first row, and the row after the last.
        columns: first column, and the column after the last, of this role's values.
    """

    blocks: Bytes
    field: Field
    head_size: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of(cls, blocks: Bytes, field: Field, head_size: int | None = None) -> "BlockTensor":
        """Return all rows and columns."""
        num_rows, num_blocks, _ = blocks.shape
        return cls(blocks, field, head_size, (0, num_rows), (0, num_blocks * field.width))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of these rows and columns."""
        return (self.rows[1] - self.rows[0], self.columns[1] - self.columns[0])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return self.field.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def T(self) -> HeldTensor:  # noqa: N802 (numpy's name)
        """Transpose, read."""
        return HeldTensor(np.asarray(self).T)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> "BlockTensor":
        index = index if isinstance(index, tuple) else (index,)
        bounds = []
        for part, (start, stop) in zip((*index, slice(None))[:2], (self.rows, self.columns), strict=True):
            low, high, _ = part.indices(stop - start)
            bounds.append((start + low, start + max(low, high)))
        return dataclasses.replace(self, rows=bounds[0], columns=bounds[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if not prod(self.shape):
            return np.empty(self.shape, dtype or self.dtype)
        (start, stop), head = self.rows, self.head_size or 1
        low, high = start - start % head, stop + -stop % head  # heads are read whole
        first, last = self.columns[0] // self.field.width, -(-self.columns[1] // self.field.width)
        view = self.blocks[low:high, first:last]
        taken = np.array(view)
        release(view)
        if self.head_size is not None:
            taken = taken[alternating(np.arange(start, stop), self.head_size) - low]
        values = np.ascontiguousarray(self.field.decode(taken)).reshape(stop - start, -1)
        skipped = first * self.field.width
        return values[:, self.columns[0] - skipped : self.columns[1] - skipped].astype(dtype or self.dtype, copy=False)


def alternating(rows: NDArray[np.int64], head_size: int) -> NDArray[np.int64]:
    """Return where a file has rows of queries or keys, in whose heads rows of the first and second half alternate."""
    head, row = np.divmod(rows, head_size)
    half, place = np.divmod(row, head_size // 2)
    return head * head_size + 2 * place + half

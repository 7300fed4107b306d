"""Conversion of stored elements, scales and zero points to the layout that devices use for every format.

Four-bit elements are two per byte, the lower column in the low bits: integers from 0 to 15, or e2m1. Eight-bit elements
are signed integers or e4m3.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.mapped_array import read
from jaxserve.weights.quantized.scheme import Role, Scheme
from jaxserve.weights.stored_tensor import Bounds

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_INT32 = (np.dtype(np.int32), np.dtype(np.uint32))
_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # column, within a word, of each nibble
_WORD_BYTES = 4


def element_dtypes(scheme: Scheme) -> tuple[np.dtype, ...]:
    """Return the dtypes that a scheme's elements may have in a file."""
    if scheme.packing == "plain":
        return (E4M3,) if scheme.elements == "e4m3" else (np.dtype(np.int8),)
    return (np.dtype(np.uint8),) if scheme.packing in ("nibbles", "row_nibbles") else _INT32


def matrix_shape(scheme: Scheme, tensors: Mapping[Role, Any]) -> tuple[int, int]:
    """Return the shape [O, I] of the matrix in a module's tensors."""
    rows, columns = tensors["elements"].shape
    per_word = 8 * _WORD_BYTES // _bits(scheme)
    if scheme.packing == "plain":
        return rows, columns
    if scheme.packing == "nibbles":
        return rows, 2 * columns
    if scheme.packing == "row_nibbles":
        return 2 * rows, columns
    if scheme.packing == "words":
        return rows, per_word * columns
    if scheme.packing == "gptq":
        return columns, per_word * rows
    return per_word * columns, rows


def other_shapes(scheme: Scheme, whole: tuple[int, int]) -> dict[Role, list[tuple[int, ...]]]:
    """Return the shapes that the other tensors of a matrix [O, I] may have in a file."""
    rows, columns = whole
    groups = -(-columns // (scheme.group or columns))
    words = _covering((0, rows), 8 * _WORD_BYTES // _bits(scheme))[1]
    if scheme.packing in ("gptq", "awq"):
        return {"scale": [(groups, rows)], "zero": [(groups, words)], "order": [(columns,)]}
    blocks = -(-rows // scheme.block_rows)
    scale: list[tuple[int, ...]] = [(blocks, groups), (blocks, 1, groups, 1)]
    scale += [(blocks,)] if groups == 1 else []
    scale += [(), (1,), (1, 1)] if scheme.group is None or blocks * groups == 1 else []
    zero: list[tuple[int, ...]] = [(rows if scheme.packing == "plain" else words, groups)]
    return {"scale": scale, "minimum": scale, "zero": zero, "input_factor": [(columns,)], "order": [(columns,)]}


def read_elements(scheme: Scheme, tensor: Any, rows: Bounds, columns: Bounds) -> NDArray[Any]:
    """Return the elements in some rows and columns."""
    if scheme.packing == "plain":
        elements = _read(tensor, rows, columns)
        return packed_pairs(elements.view(np.uint8) + np.uint8(8)) if scheme.is_packed else elements
    per_byte, per_word = 8 // _bits(scheme), 8 * _WORD_BYTES // _bits(scheme)
    if scheme.packing == "nibbles":
        return _read(tensor, rows, _covering(columns, per_byte))
    if scheme.packing == "row_nibbles":
        pairs = _covering(rows, per_byte)
        stored, first = _read(tensor, pairs, columns), rows[0] - per_byte * pairs[0]
        signed = nibbles(stored.T).T
        return packed_pairs(signed[first : first + rows[1] - rows[0]] ^ np.uint8(8))
    words = _covering(columns, per_word)
    if scheme.packing == "awq":
        return packed_pairs(_awq_nibbles(tensor, rows, columns).T)
    stored = _read(tensor, words, rows).T if scheme.packing == "gptq" else _read(tensor, rows, words)
    all_bytes = np.ascontiguousarray(stored).view(np.uint8)
    first = (columns[0] - words[0] * per_word) // per_byte
    taken = all_bytes[:, first : first + -(-(columns[1] - columns[0]) // per_byte)]
    return _signed(taken) if scheme.elements == "int8" else taken


def read_scale(scheme: Scheme, tensor: Any, rows: Bounds) -> NDArray[Any]:
    """Return scales or minima for some rows, [rows, groups], whether stored by tensor, row, group or block."""
    num_rows, shape = rows[1] - rows[0], tuple(tensor.shape)
    if scheme.packing in ("gptq", "awq"):
        scale = _read(tensor, (0, shape[0]), rows).T
    elif np.prod(shape, dtype=int) == 1:
        scale = np.broadcast_to(np.asarray(tensor).reshape(1, 1), (num_rows, 1))
    elif len(shape) == 2:
        blocks = (rows[0] // scheme.block_rows, -(-rows[1] // scheme.block_rows))
        scale = _read(tensor, blocks, (0, shape[1]))[np.arange(*rows) // scheme.block_rows - blocks[0]]
    else:  # a vector of rows, or blocks [rows, 1, columns, 1]
        scale = np.asarray(tensor).reshape(shape[0], -1)[np.arange(*rows) // scheme.block_rows]
    if scale.dtype == np.uint8:  # exponents
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    return scale.astype(np.dtype(scheme.scale_dtype), copy=False)


def read_zero(scheme: Scheme, tensor: Any, rows: Bounds) -> NDArray[Any]:
    """Return zero points for some rows, [rows, groups]."""
    per_word = 8 * _WORD_BYTES // _bits(scheme)
    if scheme.packing == "plain":
        zero: NDArray[Any] = np.asarray(tensor)[slice(*rows)].astype(np.int8)
        return zero.view(np.uint8) + np.uint8(8) if scheme.is_packed else zero
    words = _covering(rows, per_word)
    if scheme.packing == "awq":
        return _awq_nibbles(tensor, rows, (0, tensor.shape[0])).T
    # A word holds consecutive rows of one group; words lie along the rows of the file in one format, else the columns.
    is_row = scheme.packing == "words"
    stored = _read(tensor, words, (0, tensor.shape[1])).T if is_row else _read(tensor, (0, tensor.shape[0]), words)
    stored = np.ascontiguousarray(stored).view(np.uint32)
    # GPTQ subtracts 1 from each zero point in a word; a zero point of 0 borrows from its neighbour, so add in words.
    one_each = np.uint32(sum(scheme.zero_offset << (_bits(scheme) * index) for index in range(per_word)))
    all_bytes = (stored + one_each).view(np.uint8)
    zero = nibbles(all_bytes) if scheme.is_packed else _signed(all_bytes)
    first = rows[0] - words[0] * per_word
    return zero.T[first : first + rows[1] - rows[0]]


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return both four-bit values in each byte, the low one first."""
    pairs: NDArray[np.uint8] = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def packed_pairs(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return bytes that each hold two columns, the lower one in the low four bits."""
    pairs: NDArray[np.uint8] = values[..., ::2] | values[..., 1::2] << np.uint8(4)
    return pairs


def _awq_nibbles(tensor: Any, packed: Bounds, other: Bounds) -> NDArray[np.uint8]:
    """Return four-bit values [other, packed] from a tensor in AWQ's order, which packs them along its columns."""
    words = _covering(packed, 8)
    all_bytes = np.ascontiguousarray(_read(tensor, other, words)).view(np.uint8)
    mixed = nibbles(all_bytes).reshape(len(all_bytes), -1, 8)
    found = np.empty_like(mixed)
    found[..., _AWQ_ORDER] = mixed
    first = packed[0] - words[0] * 8
    return found.reshape(len(all_bytes), -1)[:, first : first + packed[1] - packed[0]]


def _signed(unsigned: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Return bytes from 0 to 255 as signed ones, 128 lower."""
    return (unsigned ^ 0x80).view(np.int8)


def _bits(scheme: Scheme) -> int:
    """Return the number of bits per element."""
    return 4 if scheme.is_packed else 8


def _covering(bounds: Bounds, size: int) -> Bounds:
    """Return the range of words that hold the elements in `bounds`, with `size` elements per word."""
    return bounds[0] // size, -(-bounds[1] // size)


def _read(tensor: Any, rows: Bounds, columns: Bounds) -> NDArray[Any]:
    """Return a copy of some rows and columns."""
    return read(tensor[slice(*rows), slice(*columns)])

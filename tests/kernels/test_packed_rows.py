"""Packed matrices: rows gathered from them, unpacking, packing in pieces, and weights that cannot be packed."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import packed_linear
from tests.kernels.test_packed_linear import SHAPES, matrix, pytestmark, rows, unpack  # noqa: F401 - pytestmark


def test_rows_are_gathered_and_clipped():
    weight = matrix((37, 8))
    (found,) = rows((packed_linear.pack(weight), np.asarray([36, 0, 15, 16, 99, -5])))
    np.testing.assert_array_equal(found, weight[[36, 0, 15, 16, 36, 0]])


@pytest.mark.parametrize("gated", [False, True])
def test_unpack_inverts_pack(gated):
    weights = [matrix((N * (2 if gated else 1), K)) for N, K in SHAPES]
    matrices = [packed_linear.pack(weight, gated=gated) for weight in weights]
    for weight, packed, (unpacked, scales, _) in zip(weights, matrices, unpack(*matrices), strict=True):
        N, K = weight.shape
        np.testing.assert_array_equal(unpacked, weight)
        assert scales.shape == (N, 0)
        num_outputs = N // 2 if gated else N
        assert (packed.shape, packed.num_outputs, packed.gated) == ((N, K), num_outputs, gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [7, 16, 48])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_may_come_in_any_order(shape, num_rows, gated):
    """The memory that rows are written to becomes the matrix, uncopied."""
    N, K = shape[0] * (2 if gated else 1), shape[1]
    weight, scales = matrix((N, K)).astype(np.int8), matrix((N, 1), 1)
    packer = packed_linear.Packer(packed_linear.abstract(N, K, np.int8, num_groups=1, gated=gated))
    for start in reversed(range(0, N, num_rows)):
        packer.write(start, weight[start : start + num_rows], scales[start : start + num_rows])
    packed = packer.matrix()
    whole = packed_linear.pack(weight, scales, gated=gated)
    np.testing.assert_array_equal(packed.weights, whole.weights)
    np.testing.assert_array_equal(packed.scales, whole.scales)
    assert packed.weights.unsafe_buffer_pointer() == packer._weights.ctypes.data


def test_a_gate_needs_as_many_rows_to_gate():
    with pytest.raises(ValueError, match="even number of rows, got 33"):
        packed_linear.pack(np.zeros((33, 8), np.float32), gated=True)


def test_blocks_that_do_not_divide_a_row_are_refused():
    with pytest.raises(ValueError, match="64 weights must divide into 3 groups"):
        packed_linear.pack(np.zeros((16, 64), np.int8), np.ones((16, 3), np.float32))


def test_int8_needs_scales():
    with pytest.raises(ValueError, match="must have scales, got int8 in 0 groups"):
        packed_linear.pack(np.zeros((16, 8), np.int8))


def test_only_integers_have_zero_points():
    weight, scales = np.zeros((16, 8), jnp.float8_e4m3fn), np.ones((16, 1), np.float32)
    with pytest.raises(ValueError, match="can have zero points, got float8"):
        packed_linear.pack(weight, scales, scales)

"""Plans and choices of the grouped product's kernels for GPUs and TPUs, on any machine."""

import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve.pallas_kernels.deviceless import H200, TPU7X, TPU_V4, TPU_V5E, TPU_V6E, Chip
from jaxserve.pallas_kernels.grouped_matmul import GROUPED_MATMUL, Problem, grouped_matmul
from jaxserve.pallas_kernels.grouped_matmul.launch import SETTINGS
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu.float_matmul import LANES, block_bytes, sublanes
from jaxserve.pallas_kernels.grouped_matmul.visits import plan_visits
from jaxserve.pallas_kernels.hopper import SHARED_BYTES
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from tests.random_runs import examples

KERNELS = GROUPED_MATMUL.backends
BF16 = jnp.dtype("bfloat16")
FACTS = {
    "num_rows": 512,
    "num_groups": 128,
    "num_outputs": 1536,
    "num_inputs": 2048,
    "dtype": BF16,
    "matrix_dtype": BF16,
    "result_dtype": BF16,
    "is_packed": False,
    "platform": "tpu",
}
planned = jax.jit(plan_visits, static_argnums=(2, 3, 4))


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 70)), min_size=6, max_size=6),
    tile_rows=st.sampled_from([16, 64]),
    is_shared=st.booleans(),
    has_rest=st.booleans(),
)
def test_visits_multiply_each_row_once(sizes, tile_rows, is_shared, has_rest):
    num_rows, first, alignment = 420, 12, tile_rows if is_shared else 8
    sizes = [*sizes, 0 if has_rest else num_rows - sum(sizes)]
    visits = planned(np.array(sizes, np.int32), np.int32(first), num_rows, tile_rows, alignment)
    matrix, base, begin, end, count = map(np.asarray, visits)
    assert count <= len(matrix)
    group_of_row = np.full(num_rows, -1)
    for m, tile, a, b in zip(matrix[:count], base, begin, end, strict=False):
        assert tile <= a < b <= tile + tile_rows
        assert tile % alignment == 0
        assert (group_of_row[a:b] == -1).all()
        group_of_row[a:b] = m - first
    rest = [-1] * (num_rows - sum(sizes))
    np.testing.assert_array_equal(group_of_row, [*np.repeat(np.arange(7), sizes), *rest])
    assert (np.diff(base[:count]) >= 0).all(), "a tile is visited without others between"
    assert not end[count:].any()


@pytest.mark.parametrize(("sizes", "count"), [([1] * 40, 40), ([40] + [0] * 39, 3), ([0] * 39 + [40], 3)])
def test_visits_are_as_few_as_can_be(sizes, count):
    assert plan_visits(jnp.array(sizes, jnp.int32), jnp.int32(0), 40, 16, 16).num_visits == count


def problem_of(num_rows, num_outputs, num_inputs, dtype="bfloat16", platform="tpu"):
    dtype = jnp.dtype(dtype)
    sizes = {"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs}
    return Problem(**FACTS | sizes | {"dtype": dtype, "matrix_dtype": dtype, "platform": platform})


@pytest.mark.parametrize("chip", [TPU_V4, TPU_V5E, TPU_V6E, TPU7X], ids=lambda chip: chip.topology_name)
def test_blocks_fit_the_memory_of_tpus(chip):
    for rows, (N, K), dtype in itertools.product(
        (8, 512, 16384), ((1536, 2048), (2048, 768), (28672, 4096), (4096, 14336), (64, 128)), ("bfloat16", "float32")
    ):
        problem = problem_of(rows, N, K, dtype)
        with jax.sharding.use_abstract_mesh(chip.mesh()):
            assert KERNELS["mosaic_tpu"].unsupported_reason(problem) is None
            launch = KERNELS["mosaic_tpu"].launch(problem)
        tiles = launch.tiles
        assert block_bytes(tiles, problem.matrix_dtype.itemsize) <= launch.chip.memory_bytes
        assert K % tiles.columns == 0
        assert tiles.columns % LANES == 0
        assert tiles.outputs == N or tiles.outputs % LANES == 0
        assert tiles.rows % sublanes(problem.matrix_dtype) == 0


def test_blocks_fit_the_memory_of_gpus():
    for rows, (N, K), outputs in itertools.product((8, 16384), ((1536, 2048), (2048, 96), (64, 64)), (64, 128, 256)):
        problem = problem_of(rows, N, K, platform="gpu")
        with SETTINGS.sized(outputs=outputs), jax.sharding.use_abstract_mesh(H200.mesh()):
            tiles = KERNELS["mosaic_gpu"].launch(problem).tiles
        assert tiles.stages >= 2
        ring = tiles.stages * (tiles.rows + tiles.outputs) * tiles.columns * 2
        assert ring + tiles.rows * tiles.outputs * 2 <= SHARED_BYTES
        assert N % tiles.outputs == K % tiles.columns == 0


@pytest.mark.parametrize(
    ("backend", "chip", "changed", "reason"),
    [
        ("mosaic_tpu", TPU_V6E, {}, None),
        ("mosaic_tpu", TPU_V6E, {"platform": "cpu"}, "TPUs only"),
        ("mosaic_tpu", TPU_V6E, {"is_packed": True}, "native"),
        ("mosaic_tpu", TPU_V6E, {"dtype": jnp.dtype("float32")}, "not float32 and bfloat16"),
        ("mosaic_tpu", TPU_V6E, {"num_inputs": 192}, "multiple of 128, not 192"),
        ("mosaic_tpu", TPU_V6E, {"num_outputs": 40}, "multiple of 16, not 40"),
        ("mosaic_gpu", H200, {"platform": "gpu"}, None),
        ("mosaic_gpu", H200, {}, "GPUs only"),
        ("mosaic_gpu", H200, {"platform": "gpu", "is_packed": True}, "native"),
        ("mosaic_gpu", H200, {"platform": "gpu", "matrix_dtype": jnp.dtype("float32")}, "not bfloat16 and float32"),
        ("mosaic_gpu", H200, {"platform": "gpu", "num_inputs": 80}, "multiple of 32, not 80"),
        ("mosaic_gpu", H200, {"platform": "gpu", "num_outputs": 96}, "multiple of 64, not 96"),
        ("mosaic_gpu", Chip("NVIDIA A100-SXM4-80GB", "gpu", 108, ""), {"platform": "gpu"}, "A100"),
    ],
)
def test_refuses_with_a_reason(backend, chip, changed, reason):
    with jax.sharding.use_abstract_mesh(chip.mesh()):
        found = KERNELS[backend].unsupported_reason(Problem(**FACTS | changed))
    assert found is None if reason is None else reason in found


def test_sizes_must_be_known():
    for backend, chip in (("mosaic_tpu", TPU_V6E), ("mosaic_gpu", H200)):
        with (
            SETTINGS.sized(columns=3),
            jax.sharding.use_abstract_mesh(chip.mesh()),
            pytest.raises(ValueError, match="columns"),
        ):
            KERNELS[backend].launch(Problem(**FACTS))


def test_on_cpus_xla_multiplies_arrays():
    args = jnp.ones((4, 64), BF16), jnp.ones((2, 64, 64), BF16), jnp.array([1, 2], jnp.int32)
    np.testing.assert_array_equal(grouped_matmul(*args)[:, 0], [64, 64, 64, 0])
    for backend in ("mosaic_tpu", "mosaic_gpu"):
        with pytest.raises(UnsupportedBackendError, match=r"runs on .PUs only; use one of \['xla'\]"):
            grouped_matmul(*args, backend=backend)

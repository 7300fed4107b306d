"""Hopper GPU kernels: their plans on any jax, their values and races in the interpreter of newer versions."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve.pallas_kernels.deviceless import Chip
from jaxserve.pallas_kernels.ragged_paged_attention import BACKENDS, Heads, mosaic_gpu, select_backend
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import plans
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import MIN_TILE_TOKENS, SHARED_BYTES, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import MIN_SPAN
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from tests.kernels.attention_cases import GPU_CASES
from tests.kernels.attention_runs import ReadInPart
from tests.random_runs import examples

needs_gpu_or_interpreter = pytest.mark.skipif(
    jax.default_backend() != "gpu" and jax.__version_info__ < (0, 11),
    reason="on a CPU GPU kernels need the interpreter of jax 0.11 and later",
)
needs_interpreter = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11),
    reason="the interpreter of GPU kernels runs on CPU, from jax 0.11 on",
)


ALIKE = [
    "decode_more_rows_than_a_group",
    "one_long_chunk_after_context",
    "padding_rows",
    "padding_tokens",
    "soft_cap",
    "sinks",
    "last_only_window_sinks",
    "one_head",
    "many_rows_share_a_prefix",
    "many_rows_share_a_prefix_of_wide_heads",
    "shared_prefix_sinks_soft_cap",
    "shared_token_written_now",
    "window_of_one_token",
    "window_across_pages",
    "window_wider_than_rows",
    "group_of_3",
    "group_of_4",
    "group_of_5",
    "group_of_8",
    "head_dim_64",
    "head_dim_512",
    "pages_of_32",
    "pages_of_64",
    "pages_of_128",
    "int8_pages_of_64",
    "int8_pages_of_8_rope",
    "int8_shared_prefix_written_now",
    "fp8_pages_of_128",
    "float8_e4m3fn_stale_nan",
    "float8_e4m3fn_shared_prefix_window_sinks",
    "float8_e4m3fn_shared_prefix_written_now",
    "rope_one_row_decoding",
    "rope_two_prompts_of_many_tiles",
    "rope_no_live_rows",
    "rope_shared_prefix",
    "rope_head_dim_96",
    "rope_head_dim_128",
    "rope_bfloat16_pool",
    "tree_chain",
    "tree_binary",
    "tree_sinks_soft_cap",
    "tree_window_of_one_token",
]
"""Cases whose parts occur in others as well: each is slow in the interpreter."""


@pytest.mark.interpreter
@needs_gpu_or_interpreter
def test_rows_see_the_pages_that_they_read():
    half = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    found = interpreted.run(
        ReadInPart("read", (1, 7, 1, 20), (50, 70, 130, 61), padding_tokens=3, **half), "mosaic_gpu"
    )
    assert found.error <= 1e-2
    assert found.pool_error == 0
    assert not found.races


@pytest.mark.interpreter
@needs_gpu_or_interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # the interpreter multiplies stale NaN too
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full if case.name in ALIKE else [], id=case.name) for case in GPU_CASES],
)
def test_matches_reference_without_races(case):
    found = interpreted.run(case, "mosaic_gpu")
    assert found.error <= 1e-2
    assert found.pool_error <= case.pool_tolerance
    assert found.is_finite
    assert not found.races


RUNS_OF_A_BUG = 4
PLANTED = {  # bug: (case, old code, new code)
    "none": ("half", "", ""),
    "keys are loaded over those still in use": ("half", "plgpu.barrier_wait(shared.k_free.at[slot])", "pass"),
    "values are read before they are there": (
        "half",
        "        if not masked:\n            plgpu.barrier_wait(shared.v_ready.at[slot])\n",
        "",
    ),
    "one page too many is waited for": (
        "half",
        "k_ready=barriers(pages, stages)",
        "k_ready=barriers(pages + 1, stages)",
    ),
    "keys are never given back": ("half", "self.ring.release_keys(slot)", "pass"),
    "a query sees the key after its own": ("half", "visible = key <= query\n", "visible = key <= query + 1\n"),
    "stale values are not cleared": ("half", "@pl.when(end < block_kv)", "@pl.when(end < 0)"),
    "the last part is not merged": ("half", "lax.div(item_end + span - 1, span)", "lax.div(item_end - 1, span)"),
    "output leaves before it is written": (
        "half",
        "        plgpu.commit_smem()\n        tokens = min(",
        "        tokens = min(",
    ),
    "merged output leaves before it is written": (
        "half",
        "        outputs.commit(config)\n        token, head =",
        "        token, head =",
    ),
    "none in trees": ("tree", "", ""),
    "siblings are seen": ("tree", "lax.shift_right_logical(word, node & 31) & 1 == 1", "node >= 0"),
    "none in a tree across blocks": ("tree_wide", "", ""),
    "nodes of whole blocks are all seen": (
        "tree_wide",
        "jnp.minimum(item.position + 1, item.tree_start)",
        "item.position + 1",
    ),
    "a window goes by the order in the pool": ("tree", "query = by_depth[0] if by_depth else query", "pass"),
    "none in a quantised pool": ("narrow", "", ""),
    "quantised values are read before they are there": (
        "narrow",
        "        plgpu.barrier_wait(shared.k_ready.at[slot])\n        plgpu.barrier_wait(shared.v_ready.at[slot])\n",
        "",
    ),
    "a block is used before others have dequantised it": (
        "narrow",
        "v_free.at[slot])\n        self._meet()",
        "v_free.at[slot])",
    ),
    "a block is given back before it is committed": ("narrow", "plgpu.commit_smem()  # completes", "pass  # completes"),
    "keys have the scales of values": ("narrow", "at[slot, :, column + i]", "at[slot, :, column + 1 - i]"),
    "stale quantised values are not cleared": (
        "narrow",
        "jnp.where(row < end, elements",
        "jnp.where(row < 64, elements",
    ),
    "none in latents": ("half_latents", "", ""),
    "latents are loaded over values still in use": (
        "half_latents",
        "        if not self.config.values_in_keys:\n            self._release(self.shared.k_free",
        "        if True:\n            self._release(self.shared.k_free",
    ),
    "values are other columns of the latents": (
        "half_latents",
        "pl.ds(self.slice.column * columns, columns)",
        "pl.ds((1 - self.slice.column) * columns, columns)",
    ),
    "a head sees the keys of later tokens": (
        "half_latents",
        "lax.div(token, jnp.full_like(token, self.config.token_heads))",
        "token",
    ),
}


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug, tmp_path):
    """A bug shows as a wrong value, a race, an error, or a kernel that never ends; without one none of them occurs.

    The interpreter runs warpgroups on threads, whose order may hide a race; so a bug has several runs to show.
    """
    case, old, new = PLANTED[bug]
    assert not old or len(interpreted.places_of("mosaic_gpu", old)) == 1, "there is no such place any more"
    if old:
        assert any(_shows(case, old, new, tmp_path) for _ in range(RUNS_OF_A_BUG))
    else:
        assert not _shows(case, old, new, tmp_path)


def _shows(case, old, new, tmp_path):
    """Return whether a run of the kernel goes wrong."""
    script = [sys.executable, str(Path(interpreted.__file__)), "mosaic_gpu", case, old, new]
    try:
        done = subprocess.run(script, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    except subprocess.TimeoutExpired:
        return True
    print(done.stdout, done.stderr)  # shown where the test fails
    if done.returncode:
        return True
    found = interpreted.Found(**json.loads(done.stdout.splitlines()[-1]))
    return found.error > 1e-2 or not found.is_finite or found.races


BF16 = jnp.dtype("bfloat16")
OPTIONS = AttentionOptions(1.0)
STEP_ROWS, STEP_TOKENS = 12, (500, 3600)
CALLS = [  # each is compiled; windows and cores cycle through their values at different paces
    KernelConfig(
        num_tokens=num_tokens,
        num_kv_heads=1 + i % 8,
        group=group,
        key_dim=head_dim,
        value_dim=head_dim,
        page_size=16,
        dtype=BF16,
        kv_dtype=BF16,
        options=AttentionOptions(1.0, window=(None, 1, 64, 100, None)[i % 5]),
        has_sinks=False,
        has_tree=i % 2 == 1,
        num_cores=(3, 132, 132)[i % 3],
        interpret=None,
    )
    for i, (group, num_tokens, head_dim) in enumerate(itertools.product((1, 4, 7), STEP_TOKENS, (64, 256, 512)))
]
CALLS += [  # of latents: the heads of a token follow each other, as tokens
    dataclasses.replace(
        CALLS[0],
        num_tokens=STEP_TOKENS[0] * heads,
        num_kv_heads=1,
        group=1,
        key_dim=rank + 64,
        value_dim=rank,
        options=OPTIONS,
        has_tree=heads == 24,
        values_in_keys=True,
        token_heads=heads,
    )
    for heads, rank in ((16, 512), (24, 512), (128, 512), (8, 64))
]


@st.composite
def steps(draw):
    """Draw rows of any lengths, live and padding, and the sizes of a call."""
    q_lens = draw(st.lists(st.one_of(st.just(1), st.integers(0, 300)), max_size=STEP_ROWS))
    past = draw(st.lists(st.integers(0, 700), min_size=len(q_lens), max_size=len(q_lens)))
    missing = STEP_ROWS - len(q_lens)
    garbage = draw(st.lists(st.integers(-99, 99), min_size=missing, max_size=missing))
    config = draw(
        st.sampled_from([config for config in CALLS if config.num_tokens // config.token_heads >= sum(q_lens)])
    )
    return config, np.array(q_lens, int), np.array(past, int), garbage


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def compiled_plans(config, rows):
    return [plan for _, plan in plans(config, rows)]


@settings(max_examples=examples(20))
@given(steps())
@pytest.mark.long
def test_plan_does_all_work_once(step):
    config, q_lens, past, garbage = step
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(int)
    as_rows = [np.concatenate([x, garbage]) for x in (q_lens + past, cu_q_lens)]
    kv_lens, starts = (jnp.asarray(x, jnp.int32) for x in as_rows)
    rows = RaggedRows(kv_lens, jnp.zeros((len(kv_lens), 1), jnp.int32), starts, jnp.int32(len(q_lens)))
    seen, n = np.zeros(config.num_tokens, int), config.token_heads
    for tiling, plan in zip(config.tilings(), compiled_plans(config, rows), strict=True):
        columns = np.asarray(plan.tiles).T
        row, base_token, lead, num_tokens, position, key_end, first_head, *blocks, tree_start = columns
        first_block, num_blocks, first_unit = blocks
        assert not (base_token[num_tokens > 0] % 8).any(), "where memory is filled from"
        for i in np.flatnonzero(num_tokens):
            tokens = base_token[i] + lead[i] + np.arange(num_tokens[i])
            seen[tokens] += 1
            assert lead[i] + num_tokens[i] <= tiling.tokens
            assert cu_q_lens[row[i]] * n <= tokens[0]
            assert tokens[-1] < cu_q_lens[row[i] + 1] * n
            assert tree_start[i] == past[row[i]] + (max(q_lens[row[i]] - 32, 0) if config.has_tree else 0)
            positions = past[row[i]] + tokens // n - cu_q_lens[row[i]]
            assert (position[i], key_end[i], first_head[i]) == (positions[0], positions[-1] + 1, tokens[0] % n)
            # Siblings of later tokens may begin their windows where the first of the nodes does.
            shallowest = min(position[i], tree_start[i]) if config.has_tree else position[i]
            first_key = 0 if config.options.window is None else max(0, shallowest - config.options.window + 1)
            assert first_block[i] == first_key // config.block_kv
            assert first_block[i] + num_blocks[i] == -(-key_end[i] // config.block_kv)
        assert not num_blocks[num_tokens == 0].any()
        units = np.concatenate([[0], np.cumsum(num_blocks * config.num_kv_heads)])
        np.testing.assert_array_equal(first_unit, units[:-1])
        _check_spans(config, np.asarray(plan.workers).T, first_unit, num_blocks, units[-1])
    assert (seen[: cu_q_lens[-1] * n] == 1).all()
    assert not seen[cu_q_lens[-1] * n :].any()


def _check_spans(config, workers, first_unit, num_blocks, num_units):
    """Check that spans follow each other, have equal lengths except for the last ones, and lie in their items."""
    first_item, end_item, start, end = workers
    np.testing.assert_array_equal(start[1:], end[:-1])
    assert start[0] == 0
    assert end[-1] == num_units
    lengths = end - start
    assert lengths.max() == min(num_units, max(-(-num_units // len(lengths)), MIN_SPAN))
    assert (np.diff(lengths) <= 0).all()

    def begin_of(item):
        tile, head = divmod(item, config.num_kv_heads)
        return first_unit[tile] + head * num_blocks[tile]

    for worker in np.flatnonzero(lengths):
        last = end_item[worker] - 1
        assert begin_of(first_item[worker]) <= start[worker]
        assert start[worker] < begin_of(first_item[worker]) + num_blocks[first_item[worker] // config.num_kv_heads]
        assert begin_of(last) < end[worker] <= begin_of(last) + num_blocks[last // config.num_kv_heads]
    assert (first_item[lengths == 0] == end_item[lengths == 0]).all()


SERVED = {"kind": Heads(8, 128), "num_query_heads": 32, "page_size": 16, "kv_dtype": "bfloat16"}


def test_serves_gpus():
    assert select_backend(platform="gpu", **SERVED) == "mosaic_gpu"
    assert "GPUs only" in mosaic_gpu.KERNEL.unsupported_reason(
        Problem(Heads(8, 128), 32, 16, jnp.dtype("bfloat16"), "cpu")
    )


@pytest.mark.parametrize(
    ("kind", "chosen"), [("NVIDIA H100 80GB HBM3", "mosaic_gpu"), ("NVIDIA A100-SXM4-80GB", "xla")]
)
def test_serves_hopper_gpus_alone(kind, chosen):
    with jax.sharding.use_abstract_mesh(Chip(kind, "gpu", 108, "").mesh()):
        assert select_backend(**SERVED) == chosen


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_dtype": "float32"}, "float32"),
        ({"kind": Heads(8, 80)}, "80"),
        ({"page_size": 24}, "24"),
        ({"num_query_heads": 136}, "136/8"),
        ({"num_query_heads": 72, "kind": Heads(8, 256)}, "at most 8"),
        ({"num_query_heads": 72, "kind": Heads(8, 512)}, "at most 8"),
        ({"kv_dtype": "int8", "kind": Heads(8, 256)}, "heads of 256 leave no registers"),
    ],
)
def test_refuses_with_a_reason(changed, reason):
    sizes = {**SERVED, **changed}
    problem = Problem(**sizes | {"kv_dtype": jnp.dtype(sizes["kv_dtype"])}, platform="gpu")
    assert reason in BACKENDS["mosaic_gpu"].unsupported_reason(problem)
    assert select_backend(platform="gpu", **sizes) == "xla"


def heads_of(kv_dtype):
    """Return calls with heads of every size and group that the kernel takes."""
    for head_dim in mosaic_gpu.HEAD_DIMS if kv_dtype == BF16 else (32, 64, 96, 128):
        for group in range(1, 17 if head_dim <= 128 else 9):
            yield KernelConfig(4096, 8, group, head_dim, head_dim, 16, BF16, kv_dtype, OPTIONS, False, False, 132, None)


def latents():
    """Return calls with latents of every size that the kernel takes."""
    for rank, rope_dim, heads in itertools.product(mosaic_gpu.RANKS, (0, 32, 64), (8, 24, 128)):
        sizes = (4096 * heads, 1, 1, rank + rope_dim, rank, 16, BF16, BF16)
        yield KernelConfig(*sizes, OPTIONS, False, False, 132, None, values_in_keys=True, token_heads=heads)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "latents"])
def test_every_stage_of_memory_fits(kind):
    """The shared memory of a multiprocessor holds at least two blocks of keys in flight."""
    for config in latents() if kind == "latents" else heads_of(jnp.dtype(kind)):
        for tiling in config.tilings():
            assert tiling.stages >= 2
            value_dim = 0 if config.values_in_keys else config.value_dim
            ring = tiling.stages * config.block_kv * (config.key_dim + value_dim) * config.kv_dtype.itemsize
            dequantised = 0
            if config.is_quantized:
                dequantised = 4 * config.block_kv * config.key_dim + tiling.stages * config.block_kv * 16
            out = tiling.warpgroups * (64 + config.out_shift) * config.out_columns * 2
            assert tiling.workers * (ring + dequantised + tiling.rows * config.key_dim * 2 + out) <= SHARED_BYTES
            assert config.warpgroup_columns % config.out_columns == 0
            assert tiling.tokens * config.group <= tiling.rows
            assert tiling.tokens % MIN_TILE_TOKENS == 0

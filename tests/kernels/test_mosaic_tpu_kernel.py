"""TPU kernel: its plan of work, and its values and races in the interpreter."""

import functools
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
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.ragged_paged_attention import (
    AttentionInputs,
    Heads,
    from_canonical,
    mosaic_tpu,
    ragged_paged_attention,
    to_canonical,
)
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import block_sizes, memory_tiles
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import work_plan as planning
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from tests.kernels import attention_reference
from tests.kernels.attention_cases import CASES, TPU_CASES
from tests.kernels.attention_runs import ReadInPart
from tests.random_runs import examples

BY_NAME = {case.name: case for case in (*CASES, *TPU_CASES)}
RUN = [
    "no_live_rows",
    "many_rows_share_a_prefix_of_wide_heads",
    "two_prompts_of_many_tiles",
    "shared_prefix_sinks_soft_cap",
    "shared_token_written_now",
    "shared_prefix_written_now",
    "stale_nan_window",
    "group_of_3",
    "pages_of_256",
    "tree_random",
    "tree_window",
    "tree_window_inside",
    "tree_int8",
    "rope_bfloat16",
    "last_only",
    "last_only_window_sinks",
    *(case.name for case in TPU_CASES),
]
"""Distinctive cases: other backends run all cases, which are slow here."""
QUICK = ["stale_nan_window"]
"""Case of the default run, which shows if the kernel does not run at all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.interpreter) for name in RUN]
)
def test_matches_reference_without_races(name):
    case = BY_NAME[name]
    found = interpreted.run(case, "mosaic_tpu")
    is_wide = case.dtype == case.kv_dtype == "float32"
    assert found.error <= (1e-5 if is_wide else 1e-2)
    # Rotated elements near zero are many float32 steps apart: they depend on how XLA computes the rotation here.
    assert found.pool_error <= (1e-3 if case.has_rope and is_wide else case.pool_tolerance)
    assert found.is_finite
    assert not found.races


@pytest.mark.interpreter
@pytest.mark.parametrize("tree", [None, "random"])
def test_rows_see_the_pages_that_they_read(tree):
    case = ReadInPart("read", (1, 7, 1, 20, 1), (50, 70, 130, 61, 16), head_dim=64, tree=tree, padding_tokens=3)
    found = interpreted.run(case, "mosaic_tpu")
    assert found.error <= 1e-5
    assert found.pool_error == 0
    assert not found.races


@pytest.mark.interpreter
def test_heads_of_two_sizes_share_pages():
    """A page of one head of 512 is two pages of one of 256: each kind reads and writes the pool as it is."""
    rng, T, options = np.random.default_rng(0), 6, AttentionOptions(0.1)
    table = jnp.array([[4, 1], [2, 0]], jnp.int32)
    rows = RaggedRows(jnp.array([20, 2]), table, jnp.array([0, 4, 6]), jnp.int32(2))
    canonical = jnp.asarray(rng.normal(size=(1, 5, 16, 2, 512)), jnp.float32)
    pool = from_canonical("mosaic_tpu", canonical)
    assert pool.shape == (1, 5, 2, 16, 512)
    for head_dim, part in ((256, 0), (512, None), (256, 1)):
        q, k, v = (jnp.asarray(rng.normal(size=(T, n, head_dim)), jnp.float32) for n in (2, 1, 1))
        own_rows = rows if part is None else rows._replace(page_table=2 * table + part)
        inputs = AttentionInputs(q, k, v, own_rows)
        num_parts = None if part is None else 2
        seen = canonical if part is None else canonical.swapaxes(2, 3).reshape(1, 10, 16, 2, 256)
        expected, seen = attention_reference.write_and_attend(inputs, seen, 0, options)
        canonical = seen if part is None else jnp.asarray(seen).reshape(1, 5, 2, 16, 512).swapaxes(2, 3)
        with mosaic_tpu.KERNEL.settings.interpreted(pltpu.InterpretParams(detect_races=True)):
            attend = functools.partial(ragged_paged_attention, options=options, layer=0, backend="mosaic_tpu")
            out, pool = jax.jit(functools.partial(attend, num_parts=num_parts))(inputs, pool)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(to_canonical("mosaic_tpu", pool, Heads(1, 512)), canonical)


PLANTED = {  # case: {bug: (old code, new code)}
    "tpu": {
        "none": ("", ""),
        "pages are read before they are there": (
            "            self._wait_for_pages(here, pages, memory.page_sems.at[slot])\n",
            "",
        ),
        "pages of another work item are waited for": (
            "self._wait_for_pages(here, pages, memory.page_sems.at[slot])",
            "self._wait_for_pages(here, pages, memory.page_sems.at[lax.rem(slot + 1, self.blocks.slots)])",
        ),
        "pages are loaded over those still in use": ("ahead = self.blocks.slots - 1", "ahead = self.blocks.slots"),
        "page ids are read before they are there": ("pl.when(span.num_pages > 0)(copy.wait)", "pass"),
        "rows attend before all is written": (
            "            for copy in writes(index):\n                copy.wait()\n\n    def _column",
            "            pass\n\n    def _column",
        ),
        "a slab is overwritten while it leaves": (
            "                for copy in writes(index - self.ahead):\n                    copy.wait()\n",
            "                pass\n",
        ),
    },
    "tpu_tree": {
        "none": ("", ""),
        "siblings are seen": ("lax.shift_right_logical(word, node & 31) & 1 == 1", "node >= 0"),
        "nodes are used before they are there": (
            "            for copy in self._query_copies(entry, slot, scratch):\n                copy.wait()\n\n"
            "            @pl.when(entry > 0)",
            "            self._query_copies(entry, slot, scratch)[0].wait()\n\n            @pl.when(entry > 0)",
        ),
        "a window goes by the order in the pool": ("query = by_depth[0] if by_depth else query", "pass"),
    },
    "tpu_narrow": {
        "none": ("", ""),
        "scales of pages are read before they are there": (
            "for copy in self._page_copies(0, 0, pages, 0, sems):",
            "for copy in self._page_copies(0, 0, pages, 0, sems)[:1]:",
        ),
        "scales of a slab are changed before they are there": (
            "            for copy in reads(index):\n                copy.wait()\n",
            "            for copy in reads(index)[:2]:\n                copy.wait()\n",
        ),
    },
    "tpu_latents": {
        "none": ("", ""),
        "values are the ends of the keys": ("kv[:, first:end]", "kv[:, first - end :]"),
        "latents are read before they are there": (
            "            self._wait_for_pages(here, pages, memory.page_sems.at[slot])\n",
            "",
        ),
    },
    "tpu_narrow_latents": {
        "none": ("", ""),
        "values have the scale of another vector": ("(key, key + columns.num_vectors - 1)", "(key, key + 1)"),
    },
}


@pytest.mark.interpreter
@pytest.mark.parametrize(("case", "bug"), [(case, bug) for case, bugs in PLANTED.items() for bug in bugs])
def test_a_planted_bug_is_caught_on_tpu(case, bug, tmp_path):
    """A bug shows as a wrong value, a race, an error, or a kernel that never ends; without one none of them occurs."""
    old, new = PLANTED[case][bug]
    assert not old or len(interpreted.places_of("mosaic_tpu", old)) == 1, "there is no such place any more"
    script = [sys.executable, str(Path(interpreted.__file__)), "mosaic_tpu", case, old, new]
    try:
        done = subprocess.run(
            script, capture_output=True, text=True, timeout=20 if old else 100, cwd=tmp_path, check=False
        )
    except subprocess.TimeoutExpired:
        assert old
        return
    found = interpreted.Found(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None
    is_right = found is not None and found.error <= 1e-2 and found.is_finite and not found.races
    assert is_right == (not old), done.stdout + done.stderr


PROBLEM = Problem(Heads(8, 128), 32, 16, jnp.dtype("bfloat16"), "tpu")
STEP_ROWS, STEP_TOKENS, TABLE_WIDTH = 12, 700, 80
PAIRS = memory_tiles.pair_columns(128)
CALLS = [
    block_sizes.KernelConfig(
        num_tokens=STEP_TOKENS,
        num_rows=STEP_ROWS,
        num_kv_heads=heads,
        group=group,
        columns=columns,
        page_size=page_size,
        table_width=TABLE_WIDTH,
        kv_dtype=jnp.dtype(dtype),
        options=AttentionOptions(1.0, window=window),
        has_sinks=False,
        has_tree=has_tree,
        vmem_bytes=2**24,
        sizes=block_sizes.BlockSizeLimits(),
        interpret=None,
    )
    for heads, group, columns, page_size, dtype, window, has_tree in [
        (8, 4, PAIRS, 16, "bfloat16", None, False),
        (1, 8, PAIRS, 128, "bfloat16", 100, True),
        (3, 3, PAIRS, 32, "float32", None, True),
        (2, 7, PAIRS, 16, "bfloat16", 1, False),
        (4, 2, PAIRS, 64, "int8", None, False),
        (1, 20, memory_tiles.latent_columns(576, 512), 64, "bfloat16", None, True),
    ]
]


@st.composite
def steps(draw):
    """Draw rows of any lengths, live and padding, and the sizes of a call."""
    q_lens = draw(st.lists(st.one_of(st.just(1), st.integers(0, 58)), max_size=STEP_ROWS))
    past = draw(st.lists(st.integers(0, 700), min_size=len(q_lens), max_size=len(q_lens)))
    missing = STEP_ROWS - len(q_lens)
    garbage = draw(st.lists(st.integers(-99, 99), min_size=missing, max_size=missing))
    return draw(st.sampled_from(CALLS)), np.array(q_lens, int), np.array(past, int), garbage


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0})
def compiled_plan(config, blocks, rows):
    return planning.make_plan(config, blocks, rows)


def table_of(flat, num_columns):
    return np.asarray(flat).reshape(-1, num_columns)


@settings(max_examples=examples(20))
@given(steps())
@pytest.mark.long
def test_plan_does_all_work_once(step):
    config, q_lens, past, garbage = step
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(int)
    as_rows = [jnp.asarray(np.concatenate([x, garbage]), jnp.int32) for x in (q_lens + past, starts)]
    table = jnp.arange(STEP_ROWS * TABLE_WIDTH, dtype=jnp.int32).reshape(STEP_ROWS, TABLE_WIDTH)
    rows = RaggedRows(as_rows[0], table, as_rows[1], jnp.int32(len(q_lens)))
    blocks = block_sizes.choose_block_sizes(config)
    plan = compiled_plan(config, blocks, rows)
    num_writes, num_decode_items, *num_tile_items = np.asarray(plan.counts)
    _check_writes(config, table_of(plan.writes, planning.NUM_WRITE_COLUMNS)[:num_writes], starts, past)
    seen = np.zeros(STEP_TOKENS, int)
    _check_decode_slots(config, blocks, plan, q_lens, past, starts, seen)
    assert np.asarray(plan.groups).sum() == num_decode_items
    for tokens, flat, num_work_items in zip(blocks.tile_tokens, plan.tiles, num_tile_items, strict=True):
        tiles = table_of(flat, planning.NUM_TILE_COLUMNS)
        assert tiles[:, planning.NUM_BLOCKS].sum() == num_work_items
        live = np.flatnonzero(tiles[:, planning.NUM_BLOCKS])
        np.testing.assert_array_equal(live, np.arange(len(live)))
        for tile in tiles[live]:
            _check_tile(config, blocks, tokens, tile, starts, past, seen)
    assert (seen[: starts[-1]] == 1).all()
    assert not seen[starts[-1] :].any()


def _check_writes(config, writes, starts, past):
    """Check that each new token is written once, to its place."""
    written = []
    for page, offset, first_token, begin, end in writes:
        row, column = divmod(page, TABLE_WIDTH)
        assert offset % config.slab == 0
        for i in range(begin, end):
            token, position = first_token + i, column * config.page_size + offset + i
            assert position - past[row] == token - starts[row]
            written.append(token)
    assert written == list(range(starts[-1]))


def _check_decode_slots(config, blocks, plan, q_lens, past, starts, seen):
    decode_slots = table_of(plan.decode_slots, planning.NUM_DECODE_COLUMNS)
    block_tokens = blocks.decode_pages * config.page_size
    slot_of_token = np.asarray(plan.slot_of_token)
    for number, (row, kv_len, first_block) in enumerate(decode_slots):
        token = np.asarray(plan.token_of_slot)[number]
        if kv_len == 0:
            assert token == STEP_TOKENS
            continue
        assert (q_lens[row], past[row] + 1, starts[row]) == (1, kv_len, token)
        assert slot_of_token[token] == number
        seen[token] += 1
        first_key = 0 if config.options.window is None else max(0, kv_len - config.options.window)
        assert first_block == first_key // block_tokens
        assert first_block + plan.groups[number // blocks.decode_slots] >= -(-kv_len // block_tokens)
    assert (slot_of_token >= 0).sum() == (q_lens == 1).sum()


def _check_tile(config, blocks, tokens, tile, starts, past, seen):
    row, base, lead, num_tokens, position, first_block, num_blocks, tree_start = tile
    block_tokens = blocks.tile_pages * config.page_size
    assert base % memory_tiles.ALIGNED_TOKENS == 0, "where memory is filled from"
    assert lead + num_tokens <= tokens
    own = base + lead + np.arange(num_tokens)
    seen[own] += 1
    assert starts[row] <= own[0]
    assert own[-1] < starts[row + 1]
    assert tree_start == past[row] + (max(starts[row + 1] - starts[row] - 32, 0) if config.has_tree else 0)
    assert position == past[row] + own[0] - starts[row]
    # Siblings of later tokens may begin their windows where the first of the nodes does.
    shallowest = min(position, tree_start) if config.has_tree else position
    first_key = 0 if config.options.window is None else max(0, shallowest - config.options.window + 1)
    assert first_block == first_key // block_tokens
    assert first_block + num_blocks == -(-(position + num_tokens) // block_tokens)

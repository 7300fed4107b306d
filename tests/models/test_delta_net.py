"""Gated delta nets over ragged rows against transformers' recurrence in float32, token by token."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from jaxserve.execution.step import step_options
from jaxserve.layers.delta_net import CHUNK, DeltaInputs, DeltaPool, GatedDelta
from jaxserve.layers.state_forms import StateRows

FORM = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5, width=4)
LAYER, NUM_LAYERS, NUM_ENTRIES = 1, 2, 9
advance = jax.jit(GatedDelta.advance, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


def random_inputs(form: GatedDelta, num_tokens: int, *, alike: bool) -> DeltaInputs:
    """Return inputs of tokens, all alike or random."""
    rng = np.random.default_rng(num_tokens)
    size = 2 * form.key_size + form.value_size
    mixed = np.repeat(rng.normal(size=(1, size)), num_tokens, 0) if alike else rng.normal(size=(num_tokens, size))
    return DeltaInputs(
        mixed=mixed.astype(np.float32),
        taps=np.random.default_rng(0).normal(size=(size, 1, form.width)).astype(np.float32),
        log_decay=(-rng.exponential(size=(num_tokens, form.num_value_heads)) * 0.3 * (not alike)).astype(np.float32),
        rate=(np.ones if alike else rng.random)((num_tokens, form.num_value_heads)).astype(np.float32),
    )


def expected(form: GatedDelta, inputs: DeltaInputs, lens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return what the tokens of a sequence read, and the memories after so many of them."""
    x = torch.tensor(inputs.mixed).T[None]
    y = oracle.causal_conv1d_fn(x, torch.tensor(inputs.taps[:, 0]), activation="silu")[0].T
    q, k, v = torch.split(y, [form.key_size, form.key_size, form.value_size], dim=1)
    q, k = (x.reshape(1, len(y), form.num_key_heads, form.key_dim) for x in (q, k))
    v = v.reshape(1, len(y), form.num_value_heads, form.value_dim)
    rates = {"g": torch.tensor(inputs.log_decay)[None], "beta": torch.tensor(inputs.rate)[None]}
    memories = []
    for stop in (*lens, len(y)):
        parts = {name: x[:, :stop] for name, x in rates.items()}
        out, memory = oracle.torch_recurrent_gated_delta_rule(
            q[:, :stop], k[:, :stop], v[:, :stop], **parts, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        memories.append(memory[0].numpy())
    return out[0].numpy(), memories


def rows_of(lens: list[int], starts: list[int], slots: list[int], num_tokens: int, **kept: list[int]) -> StateRows:
    """Return rows of these lengths, padded to one more row and to `num_tokens`."""
    ends = np.cumsum([0, *lens, 0])
    row = np.minimum((np.arange(num_tokens)[:, None] >= ends[None, 1:]).sum(1), len(lens))
    columns = {"source": slots, "target": slots, "start": starts, "kept_len": [0] * len(lens), "kept": [0] * len(lens)}
    padded = {name: np.array([*column, 0], np.int32) for name, column in (columns | kept).items()}
    offset = np.arange(num_tokens) - ends[row]
    return StateRows(
        **padded, cu_q_lens=ends.astype(np.int32), row=row.astype(np.int32), offset=offset.astype(np.int32)
    )


STEPS = [  # tokens of the first three sequences in each step
    [1, 7, 2 * CHUNK + 5],
    [1, CHUNK, 0],
    [1, 1, 1],
    [0, 3, CHUNK],
    [90, 1, 2],
]
NUM_TOKENS = 2 * CHUNK + 16  # tokens of each step, with padding


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("form", [FORM, replace(FORM, num_value_heads=2, width=1, key_dim=8, value_dim=16)])
def test_any_division_into_rows_is_the_recurrence(form: GatedDelta, alike: bool) -> None:
    inputs = [random_inputs(form, sum(counts), alike=alike) for counts in zip(*STEPS, strict=True)]
    # Entries are not empty: sequences start from zeros all the same.
    pool = DeltaPool(*(jnp.full_like(x, 3.0) for x in form.new(NUM_LAYERS, NUM_ENTRIES)))
    slots, done, outputs = [4, 0, 2], [0, 0, 0], [[], [], []]
    for counts in STEPS:
        rows = rows_of(counts, done, slots, NUM_TOKENS)
        step = _joined(inputs, done, counts)
        before = pool
        out, pool = advance(form, step, rows, pool, jnp.int32(LAYER))
        for index, (start, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
            outputs[index].append(np.asarray(out[start : start + count]))
            done[index] += count
        others = [entry for entry in range(NUM_ENTRIES) if entry not in slots or not counts[slots.index(entry)]]
        for new, old in zip(pool, before, strict=True):
            np.testing.assert_array_equal(new[1 - LAYER], old[1 - LAYER])
            np.testing.assert_array_equal(new[LAYER, others], old[LAYER, others])
    for parts, sequence, slot in zip(outputs, inputs, slots, strict=True):
        wanted, (memory,) = expected(form, sequence, [])
        np.testing.assert_allclose(np.concatenate(parts), wanted, rtol=0, atol=2e-5)
        np.testing.assert_allclose(pool.memory[LAYER, slot], memory, rtol=0, atol=2e-5)


def _joined(inputs: list[DeltaInputs], starts: list[int], counts: list[int]) -> DeltaInputs:
    """Return the next tokens of some sequences, and padding that is no number."""

    def join(name: str) -> np.ndarray:
        parts = [getattr(x, name)[a : a + n] for x, a, n in zip(inputs, starts, counts, strict=True)]
        padding = np.full((NUM_TOKENS - sum(counts), parts[0].shape[1]), np.nan, np.float32)
        return np.concatenate([*parts, padding])

    return DeltaInputs(join("mixed"), inputs[0].taps, join("log_decay"), join("rate"))


@pytest.mark.parametrize("kept_len", [1, CHUNK, CHUNK + 8, 2 * CHUNK + 1])
def test_a_snapshot_inside_a_row_is_the_state_there(kept_len: int) -> None:
    num_tokens = 2 * CHUNK + 1
    inputs, pool = random_inputs(FORM, num_tokens, alike=False), FORM.new(NUM_LAYERS, NUM_ENTRIES)
    rows = rows_of([num_tokens], [0], [3], num_tokens, kept_len=[kept_len], kept=[7])
    out, pool = advance(FORM, inputs, rows, pool, jnp.int32(LAYER))
    wanted, memories = expected(FORM, inputs, [kept_len])
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5)
    for entry, memory in zip((7, 3), memories, strict=True):
        np.testing.assert_allclose(pool.memory[LAYER, entry], memory, rtol=0, atol=2e-5)
    if kept_len == num_tokens:
        return
    # Another slot goes on from it.
    rest = DeltaInputs(inputs.mixed[kept_len:], inputs.taps, inputs.log_decay[kept_len:], inputs.rate[kept_len:])
    rows = rows_of([num_tokens - kept_len], [kept_len], [5], num_tokens - kept_len, source=[7])
    out, pool = advance(FORM, rest, rows, pool, jnp.int32(LAYER))
    np.testing.assert_allclose(out, wanted[kept_len:], rtol=0, atol=2e-5)
    np.testing.assert_allclose(pool.window[LAYER, 5], pool.window[LAYER, 3], rtol=0, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_the_pool_is_changed_in_place(num_tokens: int) -> None:
    rows = rows_of([num_tokens], [1], [3], num_tokens)
    if num_tokens == 1:  # a single row, without padding
        fields = {name: x[:1] for name, x in rows._asdict().items()}
        rows = StateRows(**fields | {"cu_q_lens": rows.cu_q_lens[:2]})
    inputs, pool = random_inputs(FORM, num_tokens, alike=False), FORM.new(NUM_LAYERS, NUM_ENTRIES)
    program = jax.jit(GatedDelta.advance, static_argnums=0, donate_argnums=3, compiler_options=step_options("cpu"))
    compiled = program.lower(FORM, inputs, rows, pool, jnp.int32(LAYER)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in pool)
    for x in pool:
        shape = ",".join(map(str, x.shape))
        makers = re.findall(rf"= f32\[{shape}\]\S* ([a-z-]+)\(", compiled.as_text())
        assert makers
        assert not {"copy", "copy-start", "transpose", "concatenate", "pad"} & set(makers)

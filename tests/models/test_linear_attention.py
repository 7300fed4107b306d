"""Gated delta nets and Mamba-2 over ragged rows against transformers' recurrences in float32, token by token."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba_oracle
from transformers.models.qwen3_next import modeling_qwen3_next as delta_oracle

from jaxserve.layers import linear_attention
from jaxserve.layers.delta_net import DeltaInputs, GatedDelta
from jaxserve.layers.linear_attention import CHUNK, MemoryPool
from jaxserve.layers.mamba import Mamba, MambaInputs
from jaxserve.layers.state_forms import StateRows
from tests.oracles import torch
from tests.own_programs import UNOPTIMIZED
from tests.parameters import mainly

DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5, width=4)
MAMBA = Mamba(num_groups=2, num_heads=6, state_dim=7, head_dim=5, width=4)
Form = GatedDelta | Mamba
Inputs = DeltaInputs | MambaInputs
LAYER, NUM_LAYERS, NUM_ENTRIES = 1, 2, 9


@partial(jax.jit, static_argnums=0, compiler_options=UNOPTIMIZED)
def advance(form: Form, *args: Any) -> tuple[jax.Array, MemoryPool]:
    return form.advance(*args)


def random_inputs(form: Form, num_tokens: int, *, alike: bool = False) -> Inputs:
    """Return inputs of tokens, all alike or random."""
    rng = np.random.default_rng(num_tokens)
    is_delta = isinstance(form, GatedDelta)
    size = 2 * (form.key_size if is_delta else form.group_size) + (form.value_size if is_delta else form.inner_size)
    num_heads = form.num_value_heads if is_delta else form.num_heads
    mixed = np.repeat(rng.normal(size=(1, size)), num_tokens, 0) if alike else rng.normal(size=(num_tokens, size))
    mixed, taps = mixed.astype(np.float32), np.random.default_rng(0).normal(size=(size, 1, form.width)) / 2
    taps, decay = taps.astype(np.float32), -rng.exponential(size=(num_tokens, num_heads)) * 0.3 * (not alike)
    rate = (np.ones if alike else rng.random)((num_tokens, num_heads))
    if is_delta:
        return DeltaInputs(mixed, taps, decay.astype(np.float32), rate.astype(np.float32))
    of_heads = np.random.default_rng(1).normal(size=(2, num_heads)).astype(np.float32)
    time_step, log_rate, skip = (0.2 * rate).astype(np.float32), *of_heads
    bias = np.random.default_rng(2).normal(size=size).astype(np.float32) if form.conv_bias else None
    return MambaInputs(mixed, taps, bias, time_step, -np.exp(log_rate) * time_step, skip)


def expected(form: Form, inputs: Inputs, lens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the outputs of a sequence's tokens, and the memories after so many of them."""
    bias = getattr(inputs, "conv_bias", None)
    y = delta_oracle.causal_conv1d_fn(
        torch.tensor(inputs.mixed).T[None],
        torch.tensor(inputs.taps[:, 0]),
        None if bias is None else torch.tensor(bias),
        activation="silu",
    )[0].T
    return (_delta if isinstance(form, GatedDelta) else _mamba)(form, inputs, y, [*lens, len(y)])


def _delta(form: Any, inputs: Any, y: torch.Tensor, lens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    q, k, v = torch.split(y, [form.key_size, form.key_size, form.value_size], dim=1)
    q, k = (x.reshape(1, len(y), form.num_key_heads, form.key_dim) for x in (q, k))
    v = v.reshape(1, len(y), form.num_value_heads, form.value_dim)
    rates = {"g": torch.tensor(inputs.log_decay)[None], "beta": torch.tensor(inputs.rate)[None]}
    memories = []
    for stop in lens:
        parts = {name: x[:, :stop] for name, x in rates.items()}
        out, memory = delta_oracle.torch_recurrent_gated_delta_rule(
            q[:, :stop], k[:, :stop], v[:, :stop], **parts, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        memories.append(memory[0].mT.numpy())
    return out[0].numpy(), memories


def _mamba(form: Any, inputs: Any, y: torch.Tensor, lens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    x, b, c = torch.split(y, [form.inner_size, form.group_size, form.group_size], dim=1)
    b, c = (z.reshape(len(y), 1, form.num_groups, form.state_dim) for z in (b, c))
    state = torch.zeros(1, form.num_heads, form.head_dim, form.state_dim)

    def wide(of_heads: np.ndarray) -> torch.Tensor:
        return torch.tensor(of_heads)[:, None].expand(-1, form.head_dim)

    outputs, memories = [], {0: state[0].numpy().copy()}
    for t, token in enumerate(x.reshape(len(y), 1, form.num_heads, form.head_dim)):
        rate = wide(inputs.log_decay[0] / inputs.time_step[0])[:, :, None].expand(-1, -1, form.state_dim)
        step = wide(inputs.time_step[t])[None]
        outputs.append(
            mamba_oracle.mamba2_selective_state_update(state, token, step, rate, b[t], c[t], wide(inputs.skip))
        )
        memories[t + 1] = state[0].numpy().copy()
    return torch.cat(outputs).numpy(), [memories[n] for n in lens]


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


FORMS = {
    "delta": DELTA,
    "delta-alike": DELTA,
    "delta-without-convolution": replace(DELTA, num_value_heads=2, width=1, key_dim=8, value_dim=16),
    "delta-together": replace(DELTA, num_value_heads=6),
    "mamba": MAMBA,
    "mamba-together": replace(MAMBA, num_heads=4),
    "mamba-without-convolution": replace(MAMBA, num_groups=1, width=1, conv_bias=False),
}
ALIKE_OTHERS = ("delta-without-convolution", "mamba-together")


@pytest.mark.parametrize("name", mainly([n for n in FORMS if n not in ALIKE_OTHERS], *ALIKE_OTHERS))
def test_any_division_into_rows_is_the_recurrence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, alike = FORMS[name], name.endswith("alike")
    if name.endswith("together"):  # forms of their own, as jit does not know what it is traced with
        monkeypatch.setattr(linear_attention, "CPU_ROWS", linear_attention.ROWS)
    inputs = [random_inputs(form, sum(counts), alike=alike) for counts in zip(*STEPS, strict=True)]
    # Entries are not empty: sequences start from zeros all the same.
    pool = MemoryPool(*(np.full_like(x, 3.0) for x in empty_pool(form)))
    slots, done, outputs = [4, 0, 2], [0, 0, 0], [[], [], []]
    for counts in STEPS:
        rows = rows_of(counts, done, slots, NUM_TOKENS)
        step = _joined(inputs, done, counts)
        before = pool
        out, pool = jax.tree.map(np.asarray, advance(form, step, rows, pool, np.int32(LAYER)))
        for index, (start, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
            outputs[index].append(out[start : start + count])
            done[index] += count
        others = [entry for entry in range(NUM_ENTRIES) if entry not in slots or not counts[slots.index(entry)]]
        for new, old in zip(pool, before, strict=True):
            np.testing.assert_array_equal(new[1 - LAYER], old[1 - LAYER])
            np.testing.assert_array_equal(new[LAYER, others], old[LAYER, others])
    for parts, sequence, slot in zip(outputs, inputs, slots, strict=True):
        wanted, (memory,) = expected(form, sequence, [])
        np.testing.assert_allclose(np.concatenate(parts), wanted, rtol=0, atol=2e-5)
        np.testing.assert_allclose(pool.memory[LAYER, slot], memory, rtol=0, atol=2e-5)


def empty_pool(form: Form) -> MemoryPool:
    """Return an empty pool in the host's memory."""
    return MemoryPool(*(np.zeros(x.shape, x.dtype) for x in jax.eval_shape(lambda: form.new(NUM_LAYERS, NUM_ENTRIES))))


def _by_token(inputs: Inputs) -> list[str]:
    """Return the names of inputs with a row per token."""
    return [name for name in ("mixed", "log_decay", "rate", "time_step") if hasattr(inputs, name)]


def _joined(inputs: list[Inputs], starts: list[int], counts: list[int]) -> Inputs:
    """Return the next tokens of some sequences, and padding that is no number."""

    def join(name: str) -> np.ndarray:
        parts = [getattr(x, name)[a : a + n] for x, a, n in zip(inputs, starts, counts, strict=True)]
        padding = np.full((NUM_TOKENS - sum(counts), parts[0].shape[1]), np.nan, np.float32)
        return np.concatenate([*parts, padding])

    return inputs[0]._replace(**{name: join(name) for name in _by_token(inputs[0])})


@pytest.mark.parametrize("form", [DELTA, MAMBA], ids=["delta", "mamba"])
@pytest.mark.parametrize("kept_len", [1, CHUNK, CHUNK + 8, 2 * CHUNK + 1])
def test_a_snapshot_inside_a_row_is_the_state_there(kept_len: int, form: Form) -> None:
    """Rows are padded to the sizes of `test_any_division_into_rows_is_the_recurrence`, whose programs they share."""
    num_tokens = 2 * CHUNK + 1
    inputs, pool = random_inputs(form, num_tokens), empty_pool(form)
    kept = {"kept_len": [kept_len, 0, 0], "kept": [7, 0, 0]}
    out, pool = one_row(form, inputs, pool, start=0, count=num_tokens, slot=3, **kept)
    wanted, memories = expected(form, inputs, [kept_len])
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5)
    for entry, memory in zip((7, 3), memories, strict=True):
        np.testing.assert_allclose(pool.memory[LAYER, entry], memory, rtol=0, atol=2e-5)
    if kept_len == num_tokens:
        return
    # Another slot goes on from it.
    out, pool = one_row(form, inputs, pool, kept_len, num_tokens - kept_len, slot=5, source=[7, 0, 1])
    np.testing.assert_allclose(out, wanted[kept_len:], rtol=0, atol=2e-5)
    np.testing.assert_allclose(pool.window[LAYER, 5], pool.window[LAYER, 3], rtol=0, atol=0)


@pytest.mark.parametrize("form", [DELTA, MAMBA], ids=["delta", "mamba"])
def test_a_step_of_one_token_takes_a_snapshot_too(form: Form) -> None:
    inputs, pool, outputs = random_inputs(form, 3), empty_pool(form), []
    for start, kept_len in enumerate([0, 1, 0]):
        kept = {"kept_len": [kept_len], "kept": [7]}
        fields = {name: x[:1] for name, x in rows_of([1], [start], [3], 1, **kept)._asdict().items()}
        rows = StateRows(**fields | {"cu_q_lens": np.array([0, 1], np.int32)})
        step = inputs._replace(**{name: getattr(inputs, name)[start : start + 1] for name in _by_token(inputs)})
        out, pool = jax.tree.map(np.asarray, advance(form, step, rows, pool, np.int32(LAYER)))
        outputs.append(out)
    wanted, memories = expected(form, inputs, [2])
    np.testing.assert_allclose(np.concatenate(outputs), wanted, rtol=0, atol=2e-5)
    for entry, memory in zip((7, 3), memories, strict=True):
        np.testing.assert_allclose(pool.memory[LAYER, entry], memory, rtol=0, atol=2e-5)


def one_row(
    form: Form, inputs: Inputs, pool: MemoryPool, start: int, count: int, slot: int, **kept: list[int]
) -> tuple[np.ndarray, MemoryPool]:
    """Return the outputs of some of a sequence's tokens in a row beside two empty ones, and the pool after them."""
    rows = rows_of([count, 0, 0], [start, 0, 0], [slot, 0, 1], NUM_TOKENS, **kept)
    step = _joined([inputs], [start], [count])
    out, pool = jax.tree.map(np.asarray, advance(form, step, rows, pool, np.int32(LAYER)))
    return out[:count], pool


@pytest.mark.parametrize(
    ("form", "num_tokens"),
    [
        pytest.param(DELTA, 1, id="delta-1"),
        pytest.param(MAMBA, 16, id="mamba-16"),
        pytest.param(DELTA, 16, marks=pytest.mark.full, id="delta-16"),
        pytest.param(MAMBA, 1, marks=pytest.mark.full, id="mamba-1"),
    ],
)
def test_the_pool_is_changed_in_place(num_tokens: int, form: Form) -> None:
    rows = rows_of([num_tokens], [1], [3], num_tokens)
    if num_tokens == 1:  # a single row, without padding
        fields = {name: x[:1] for name, x in rows._asdict().items()}
        rows = StateRows(**fields | {"cu_q_lens": rows.cu_q_lens[:2]})
    inputs, pool = random_inputs(form, num_tokens), form.new(NUM_LAYERS, NUM_ENTRIES)
    program = jax.jit(type(form).advance, static_argnums=0, donate_argnums=3, compiler_options=UNOPTIMIZED)
    compiled = program.lower(form, inputs, rows, pool, jnp.int32(LAYER)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in pool)
    for x in pool:
        shape = ",".join(map(str, x.shape))
        makers = re.findall(rf"= f32\[{shape}\]\S* ([a-z-]+)\(", compiled.as_text())
        assert makers
        assert not {"copy", "copy-start", "transpose", "concatenate", "pad"} & set(makers)

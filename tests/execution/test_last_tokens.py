"""Steps in which the last layers compute only each row's last token, against steps that compute all tokens.

The rows' logits, keys, values, recurrent states and later steps are the same.
"""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import FAMILIES, VARIED, hf_dict
from jaxtyping import Array

from jaxserve import weights
from jaxserve.execution import round as round_module
from jaxserve.execution.lowering import known_options
from jaxserve.execution.round import Model, run_model
from jaxserve.execution.rows import Rows, Tokens, place_tokens
from jaxserve.execution.state import ServeState, new_state
from jaxserve.layers.state_forms import StateRows
from jaxserve.models import decoder, last_layers, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels import native
from jaxserve.scheduling.schedule_config import ScheduleConfig
from tests.soon_compiled import unoptimized

R, T, PAGE_SIZE, MAX_PAGES = 4, 24, 4, 8
STEPS = ((9, 0, 5, 1), (1, 12, 6, 1), (1, 1, 0, 1), (0, 3, 1, 0))  # tokens of each row
QUICK = ("llama", "deepseek_v3", "gpt2")
BACKENDS = {"native": VARIED, "xla": ("llama", "qwen3_5")} if native.unavailable() is None else {"xla": VARIED}


class Session:
    """Rows of a model whose steps are run by hand."""

    def __init__(self, arch: ArchConfig, params: Params, backend: str, **options: Any) -> None:
        self.params, self.model = params, Model.from_arch(arch, backend=backend)
        num_pages = R * MAX_PAGES * len(arch.kv_layout.windows)
        sizes = (R, T, PAGE_SIZE * MAX_PAGES, PAGE_SIZE, num_pages)
        schedule = ScheduleConfig(*sizes, windows=arch.kv_layout.windows, **options)
        self.state = new_state(arch, schedule, kv_dtype=jnp.float32, backend=backend)
        table = np.random.default_rng(0).permutation(num_pages).reshape(-1, MAX_PAGES)
        sequences = dataclasses.replace(self.state.sequences, page_table=jnp.asarray(table, jnp.int32))
        self.state = dataclasses.replace(self.state, sequences=sequences)
        self._step = jax.jit(self._compute, compiler_options=known_options(unoptimized("cpu")))

    def _compute(
        self, params: Params, state: ServeState, q_lens: Array, ids: Array, last_only: Array
    ) -> tuple[ServeState, Array]:
        slot = jnp.arange(R)
        start = state.sequences.lengths(slot)
        rows = Rows.packed(slot, start, q_lens, q_lens > 0)
        row, offset, before, live = place_tokens(rows, T)
        tokens = Tokens(row, before.history, before.position, live, row, ids)
        zeros = jnp.zeros(R, jnp.int32)
        states = StateRows(slot, slot, start.history, rows.cu_q_lens, row, offset, zeros, zeros)
        hidden, _, state = run_model(
            params,
            state,
            rows,
            tokens,
            jnp.int32(R),
            self.model,
            state_rows=states if self.model.arch.state else None,
            last_only=last_only,
        )
        sequences = dataclasses.replace(state.sequences, length=rows.end.history)
        logits = decoder.compute_logits(params, self.model.arch, hidden)
        return dataclasses.replace(state, sequences=sequences), logits

    def step(self, q_lens: tuple[int, ...], ids: np.ndarray, *, last_only: bool = True) -> np.ndarray:
        """Compute tokens of each row; return all tokens' logits."""
        lens = np.array(q_lens, np.int32)
        self.state, logits = self._step(self.params, self.state, lens, ids, last_only)
        return np.asarray(logits)[: lens.sum()]


def close(found: object, expected: object) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


def mark(backend: str, family: str) -> Any:
    if backend == next(iter(BACKENDS)) and family in QUICK:
        return ()
    return pytest.mark.long if family in BACKENDS[backend] else pytest.mark.full


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        pytest.param(backend, family, marks=mark(backend, family), id=f"{backend}-{family}")
        for backend in BACKENDS
        for family in FAMILIES
    ],
)
def test_last_tokens_are_those_of_steps_with_all(backend: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_layers, "BLOCK_TOKENS", 10)  # several blocks
    arch = registry.from_hf_config(hf_dict(family))
    specs = registry.param_specs(arch)
    params = weights.dummy(specs, 0, jnp.float32)
    chosen = Session(arch, params, backend)
    every = copy.copy(chosen)  # the same program, which computes all tokens at run time
    rng = np.random.default_rng(1)
    for number, q_lens in enumerate(STEPS):
        ids = rng.integers(3, arch.vocab_size, T).astype(np.int32)
        last_only = number != 1  # a request for prompt logprobs needs all tokens
        expected, found = every.step(q_lens, ids, last_only=False), chosen.step(q_lens, ids, last_only=last_only)
        ends = np.cumsum(q_lens)[np.array(q_lens) > 0] - 1
        close(found[ends], expected[ends])
        if not last_only:
            close(found, expected)
    close((chosen.state.kv_pages, chosen.state.states), (every.state.kv_pages, every.state.states))


@pytest.mark.long
def test_experts_of_the_last_layers_count_all_tokens() -> None:
    arch = registry.from_hf_config(hf_dict("qwen3_moe"))
    params = weights.dummy(registry.param_specs(arch), 0, jnp.float32)
    session = Session(arch, params, "xla", count_expert_tokens=True)
    session.step(STEPS[0], np.zeros(T, np.int32))
    assert arch.experts is not None
    np.testing.assert_array_equal(session.state.expert_tokens.sum(1), sum(STEPS[0]) * arch.experts.per_token)


def test_only_cpus_leave_out_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.from_arch(registry.from_hf_config(hf_dict("llama")), backend="xla")
    assert model.can_leave_out_tokens
    monkeypatch.setattr(round_module, "target_platform", lambda: "gpu")  # its attention may be XLA's too
    assert not model.can_leave_out_tokens

"""Rows that attend to some of their pages, against transformers with caches of these pages' tokens."""

import copy
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jaxtyping import Array

from jaxserve import weights
from jaxserve.execution.lowering import known_options
from jaxserve.execution.round import Model, run_model
from jaxserve.execution.rows import Rows, Tokens, place_tokens
from jaxserve.execution.state import ServeState, new_state
from jaxserve.models import decoder, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, matrix_transform
from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import PagesToRead
from jaxserve.scheduling.schedule_config import ScheduleConfig
from tests import oracles
from tests.checkpoints import write_checkpoint
from tests.oracles import has_torch, torch
from tests.soon_compiled import unoptimized

R, T, PAGE_SIZE, MAX_PAGES = 2, 24, 4, 8
SCHEDULE = ScheduleConfig(R, T, PAGE_SIZE * MAX_PAGES, PAGE_SIZE, R * MAX_PAGES)
# Steps: tokens of each row, and the columns that it skips. The others it reads, those that it writes to among them.
STEPS = (((12, 10), ((), ())), ((6, 6), ((1,), ())), ((1, 1), ((0, 2), (1, 2, 3))), ((2, 0), ((3,), ())))


class Session:
    """Rows of a model whose steps are run by hand."""

    def __init__(self, arch: ArchConfig, params: Params, backend: str) -> None:
        self.params, self.model = params, Model.from_arch(arch, backend=backend)
        state = new_state(arch, SCHEDULE, kv_dtype=jnp.float32, backend=backend)
        table = np.random.default_rng(0).permutation(R * MAX_PAGES).reshape(R, MAX_PAGES)
        self.state = dataclasses.replace(
            state, sequences=dataclasses.replace(state.sequences, page_table=jnp.asarray(table, jnp.int32))
        )
        self._step = jax.jit(self._compute, compiler_options=known_options(unoptimized("cpu")))

    def _compute(
        self, params: Params, state: ServeState, q_lens: Array, ids: Array, pages: PagesToRead | None
    ) -> tuple[ServeState, Array]:
        slot = jnp.arange(R)
        start = state.sequences.lengths(slot)
        rows = Rows.packed(slot, start, q_lens, q_lens > 0, None if pages is None else (pages,))
        row, _, before, live = place_tokens(rows, T)
        tokens = Tokens(row, before.history, before.position, live, row, ids)
        hidden, _, state = run_model(params, state, rows, tokens, jnp.int32(R), self.model)
        sequences = dataclasses.replace(state.sequences, length=rows.end.history)
        logits = decoder.compute_logits(params, self.model.arch, hidden)
        return dataclasses.replace(state, sequences=sequences), logits

    def step(self, ids: list[list[int]], skipped: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
        """Compute tokens of each row; return their logits."""
        flat = np.resize(np.array([i for each in ids for i in each], np.int32), T)
        q_lens = np.array([len(each) for each in ids], np.int32)
        pages = None
        if any(skipped):
            columns = np.array([[*np.setdiff1d(range(MAX_PAGES), each), *each] for each in skipped], np.int32)
            pages = PagesToRead(*jax.device_put((columns, np.array([len(each) for each in skipped], np.int32))))
        self.state, logits = self._step(self.params, self.state, q_lens, flat, pages)
        return np.split(np.asarray(logits), np.cumsum(q_lens))[:R]


class Oracle:
    """One sequence by transformers, whose cache has all tokens that were computed."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model, self.cache = model, transformers.DynamicCache(config=model.config)

    def step(self, ids: list[int], skipped: tuple[int, ...]) -> np.ndarray:
        """Return the logits of tokens that see what was computed before, but for the pages that are skipped."""
        start, seen = self.cache.get_seq_length(), copy.deepcopy(self.cache)
        kept = [i for i in range(start) if i // PAGE_SIZE not in skipped]
        for layer in seen.layers if start else ():
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        name = oracles.cache_argument(self.model)
        positions = torch.arange(start, start + len(ids))[None]
        with torch.no_grad():
            logits = self.model(torch.tensor([ids]), position_ids=positions, **{name: seen}).logits[0].numpy()
        for index, layer in enumerate(seen.layers):
            self.cache.update(layer.keys[:, :, len(kept) :], layer.values[:, :, len(kept) :], index)
        return logits


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", ["native", "xla"] if native.unavailable() is None else ["xla"])
def test_rows_see_the_pages_that_they_read(tmp_path: Path, backend: str, family: str) -> None:
    if not has_torch:
        oracles.skip()
    model = write_checkpoint(tmp_path, family)
    arch = registry.from_hf_config(weights.read_config(tmp_path))
    specs = registry.param_specs(arch)
    params = weights.load(tmp_path, specs, jnp.float32, transform=matrix_transform(specs))
    session, alone = Session(arch, params, backend), [Oracle(model) for _ in range(R)]
    rng = np.random.default_rng(1)
    for q_lens, skipped in STEPS:
        ids = [rng.integers(3, arch.vocab_size, count).tolist() for count in q_lens]
        found = session.step(ids, skipped)
        for row in range(R):
            if ids[row]:
                np.testing.assert_allclose(found[row], alone[row].step(ids[row], skipped[row]), atol=1e-4)

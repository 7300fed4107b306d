"""Sampling from logits split by vocabulary over devices, against the same on one device."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.sampling import (
    SamplingRows,
    SlotTable,
    TokenLogprobs,
    VocabSplit,
    mask_part,
    sample,
    token_logprobs,
)
from jaxserve.execution.sampling.sampler import takes_most_likely
from jaxserve.layers.sharding import TENSOR, over_devices, replicated, tensor_mesh, tensor_size
from tests.sampling.sampling_cases import any_rows, any_table, make_rows, make_table

BASE_SEED = jnp.uint32(42)
NUM_TOP = 20


@jax.jit
def on_one(logits: jax.Array, rows: SamplingRows, table: SlotTable) -> tuple[jax.Array, TokenLogprobs]:
    token_ids = sample(logits, rows, table, BASE_SEED)
    return token_ids, token_logprobs(logits, token_ids, NUM_TOP)


@partial(jax.jit, static_argnums=2)
def mask_parts(allowed: jax.Array, first: jax.Array, size: int) -> jax.Array:
    return jax.vmap(lambda words: mask_part(words, first, size))(allowed)


class OnDevices:
    """Sampling functions over some devices."""

    def __init__(self, num_devices: int, vocab_size: int, rows: SamplingRows, table: SlotTable) -> None:
        self.mesh = tensor_mesh(num_devices)
        assert self.mesh is not None
        self.padding = -vocab_size % num_devices
        self.put = lambda x: jax.device_put(x, replicated(self.mesh))
        split = VocabSplit(TENSOR, num_devices, vocab_size)

        def run(logits: jax.Array, rows: SamplingRows, table: SlotTable) -> tuple[jax.Array, TokenLogprobs]:
            token_ids = split.sample(logits, rows, table, BASE_SEED)
            return token_ids, split.token_logprobs(logits, token_ids, NUM_TOP)

        logits = np.zeros((len(rows.live), vocab_size), np.float32)
        args = (self._place(logits), *self._operands(rows, table))
        self.run = jax.jit(over_devices(run, self.mesh, args, PartitionSpec()))

    def _place(self, logits: np.ndarray) -> jax.Array:
        """Padding is larger than any logit, which must not matter."""
        padded = np.pad(logits, ((0, 0), (0, self.padding)), constant_values=1e9)
        return jax.device_put(padded, NamedSharding(self.mesh, PartitionSpec(None, TENSOR)))

    def _operands(self, rows: SamplingRows, table: SlotTable) -> tuple[SamplingRows, SlotTable]:
        rows, table = jax.tree.map(self.put, (rows, table))
        counts = np.pad(table.token_counts, ((0, 0), (0, self.padding)))
        size = counts.shape[1] // tensor_size(self.mesh)
        parts = [mask_parts(table.allowed, jnp.int32(first), size) for first in range(0, counts.shape[1], size)]
        split = partial(jax.device_put, device=NamedSharding(self.mesh, PartitionSpec(None, TENSOR)))
        return rows, dataclasses.replace(
            table, token_counts=split(counts), allowed=split(np.concatenate(parts, axis=1))
        )

    def __call__(self, logits: np.ndarray, rows: SamplingRows, table: SlotTable) -> Any:
        return self.run(self._place(logits), *self._operands(rows, table))


@pytest.fixture(scope="module")
def small() -> OnDevices:
    """Return the functions over devices of which the last has only padding."""
    return OnDevices(8, 41, make_rows(5), make_table(5, 41))


@pytest.mark.parametrize(
    ("num_devices", "num_rows", "vocab_size"),
    [(8, 5, 41), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in [(8, 5, 131), (4, 17, 1024)])],
)
def test_samples_and_logprobs_are_those_of_one_device(
    small: OnDevices, num_devices: int, num_rows: int, vocab_size: int
) -> None:
    rng = np.random.default_rng(num_rows)
    rows, table = any_rows(rng, num_rows), any_table(rng, num_rows, vocab_size)
    greedy = make_rows(num_rows, temperature=np.float32(0))
    assert takes_most_likely(jax.tree.map(jnp.asarray, greedy))
    split = small if vocab_size == 41 else OnDevices(num_devices, vocab_size, rows, table)
    for case in range(6):
        logits = rng.normal(scale=3, size=(num_rows, vocab_size)).astype(np.float32)
        if case % 2:
            logits = np.clip(np.round(logits), -2, 3)  # ties within and between devices
        for asked in (rows, greedy, any_rows(rng, num_rows)):
            token_ids, logprobs = split(logits, asked, table)
            expected_ids, expected = on_one(logits, asked, table)
            np.testing.assert_array_equal(token_ids, expected_ids)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), logprobs, expected)


def test_a_row_without_any_finite_logit_stays_in_the_vocabulary(small: OnDevices) -> None:
    rows, table = make_rows(5, temperature=np.float32(0)), make_table(5, 41)
    for value in (-np.inf, np.inf, np.nan):
        token_ids, _ = small(np.full((5, 41), value, np.float32), rows, table)
        assert ((np.asarray(token_ids) >= 0) & (np.asarray(token_ids) < 41)).all()

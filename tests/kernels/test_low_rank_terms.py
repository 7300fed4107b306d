"""Low-rank terms of some tokens, as LoRA adapters have, that the native kernels add while they multiply."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native, packed_linear
from jaxserve.pallas_kernels.packed_linear import LowRankTerms

reason = packed_linear.unsupported("float32", jax.default_backend())
INSTRUCTION_SETS = native.instruction_sets() if reason is None else []
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

UNOPTIMIZED = {"xla_backend_optimization_level": 0}
EPS, NUM_SLOTS, RANK = 1e-5, 3, 16
TOKEN_COUNTS = (1, 5, 37)
SEVERAL_BLOCKS = 300  # minutes in the emulator
# Outputs by part, and whether the matrix is gated: parts need not end with a panel.
MATRICES = {"whole": ((40,), False), "parts": ((33, 9, 22), False)}
MATRICES |= {"gated": ((37, 37), True), "gated whole": ((74,), True)}
DTYPES = {"whole": jnp.bfloat16, "parts": jnp.float32, "gated": jnp.float16, "gated whole": jnp.bfloat16}
COLUMNS = 64


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def products(calls):
    return [
        packed_linear.multiply(matrix, x, rms_norm=None if norm is None else (norm, EPS), **operands)
        for matrix, x, norm, operands in calls
    ]


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def rounded_products(calls):
    return [packed_linear.multiply(matrix, x, input_format="int8", terms=terms) for matrix, x, terms in calls]


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def panels(matrices, *, gated=False):
    """Return the panels of matrices [S, rows, columns]."""
    joined = matrices.reshape(-1, matrices.shape[-1])
    return packed_linear.pack(joined, num_matrices=len(matrices), gated=gated).weights


def slots_of(num_tokens):
    return np.random.default_rng(num_tokens).integers(0, NUM_SLOTS + 1, num_tokens).astype(np.int32)


class Case:
    """A matrix of a name in MATRICES, and its adapters."""

    def __init__(self, name):
        self.sizes, self.gated = MATRICES[name]
        rows, dtype = sum(self.sizes), DTYPES[name]
        self.weight = draw(rows, COLUMNS).astype(dtype)
        self.a = draw(NUM_SLOTS, len(self.sizes) * RANK, COLUMNS, seed=1).astype(dtype)
        self.b = draw(NUM_SLOTS, rows, RANK, seed=2).astype(dtype)
        self.shift, self.factor = draw(NUM_SLOTS, rows, seed=3), draw(NUM_SLOTS, rows, seed=4)
        self.bias, self.norm = draw(rows, seed=5), draw(COLUMNS, seed=6)

    def call(self, x, slots, *, vectors=True, terms=True):
        vector = (self.shift, self.factor) if vectors else (None, None)
        own = LowRankTerms(slots, panels(self.a), panels(self.b, gated=self.gated), self.sizes, *vector)
        operands = {"bias": self.bias, "terms": own if terms else None}
        return packed_linear.pack(self.weight, gated=self.gated), x, self.norm, operands

    def expected(self, x, slots, *, vectors=True):
        x = x.astype(np.float64)
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * self.norm
        y, ends = x @ self.weight.astype(np.float64).T, np.cumsum(self.sizes)[:-1]
        for token, slot in enumerate(slots):
            if slot:
                a, b = (each[slot - 1].astype(np.float64) for each in (self.a, self.b))
                parts = zip(np.split(a @ x[token], len(self.sizes)), np.split(b, ends), strict=True)
                y[token] += np.concatenate([second @ inner for inner, second in parts])
                if vectors:
                    y[token] = (y[token] + self.shift[slot - 1]) * self.factor[slot - 1]
        y += self.bias
        if not self.gated:
            return y
        gate, up = np.split(y, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", MATRICES)
def test_terms_are_those_of_numpy(instruction_set, name):
    case, counts = Case(name), TOKEN_COUNTS if instruction_set.startswith("neon") else (*TOKEN_COUNTS, SEVERAL_BLOCKS)
    cases = [(draw(count, COLUMNS, seed=7), slots_of(count), has) for count in counts for has in (False, True)]
    with native.using(instruction_set):
        found = products([case.call(x, slots, vectors=has) for x, slots, has in cases])
    for (x, slots, has), y in zip(cases, found, strict=True):
        wanted = case.expected(x, slots, vectors=has)
        np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_token_has_the_same_bits_in_any_mix(instruction_set):
    """Tokens without terms have the bits of a call without terms, others the bits that they have by themselves."""
    case, num_tokens = Case("gated"), 37
    x, slots = draw(num_tokens, COLUMNS, seed=7), slots_of(num_tokens)
    alone = [case.call(x[token : token + 1], slots[token : token + 1]) for token in range(num_tokens)]
    others = [case.call(x, slots, terms=False), case.call(x, np.zeros_like(slots))]
    with native.using(instruction_set):
        mixed, without, idle, *own = map(np.asarray, products([case.call(x, slots), *others, *alone]))
    np.testing.assert_array_equal(mixed[slots == 0], without[slots == 0])
    np.testing.assert_array_equal(idle, without)
    np.testing.assert_array_equal(mixed, np.concatenate(own))


def test_terms_of_quantised_inputs_have_all_bits():
    """Inputs that the kernel rounds to int8, or that come in another order, are the matrix's own."""
    case, num_tokens = Case("whole"), 5
    elements = np.random.default_rng(0).integers(-127, 128, (40, COLUMNS)).astype(np.int8)
    packed = packed_linear.pack(elements, np.ones((40, 1), np.float32))
    x, slots = draw(num_tokens, COLUMNS, seed=7), np.asarray([1, 0, 2, 3, 2], np.int32)
    terms = LowRankTerms(slots, panels(case.a), panels(case.b), case.sizes)
    calls = [(packed, x, None), (packed, x, terms)]
    calls += [(packed, x[:, ::-1], None), (packed, x[:, ::-1], replace(terms, x=x))]
    plain, found, plain_reversed, other = map(np.asarray, rounded_products(calls))
    expected = np.asarray(packed_linear.multiply_low_rank(terms, jnp.asarray(x), NUM_SLOTS))
    np.testing.assert_allclose(found - plain, expected, atol=1e-5 * np.abs(plain).max())
    assert not expected[1].any()
    np.testing.assert_allclose(other - plain_reversed, expected, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_each_group_has_adapters_of_its_own(instruction_set):
    group_sizes, gated = np.asarray([4, 0, 1, 9], np.int32), True
    num_groups, num_rows = len(group_sizes), 16
    weight, x = draw(num_groups, 44, COLUMNS), draw(num_rows, COLUMNS, seed=7)
    a, b = draw(NUM_SLOTS * num_groups, 2 * RANK, COLUMNS, seed=1), draw(NUM_SLOTS * num_groups, 44, RANK, seed=2)
    slots = slots_of(num_rows)
    terms = LowRankTerms(slots, panels(a), panels(b, gated=gated), (22, 22))
    packed = packed_linear.pack(weight.reshape(-1, COLUMNS), num_matrices=num_groups, gated=gated)

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def multiply(x, sizes, terms):
        return [packed_linear.multiply_groups(packed, x, sizes, terms=own) for own in (None, terms)]

    with native.using(instruction_set):
        plain, found = map(np.asarray, multiply(x, group_sizes, terms))
    group = np.repeat(np.arange(num_groups), group_sizes)
    for row, (own, slot) in enumerate(zip(group, slots, strict=False)):
        y = weight[own] @ x[row]
        if slot:
            index = (slot - 1) * num_groups + own
            inner = np.split(a[index] @ x[row], 2)
            y += np.concatenate([half @ first for half, first in zip(np.split(b[index], 2), inner, strict=True)])
        else:
            np.testing.assert_array_equal(found[row], plain[row])
        gate, up = np.split(y.astype(np.float64), 2)
        np.testing.assert_allclose(found[row], gate / (1 + np.exp(-gate)) * up, rtol=0, atol=2e-4 * np.abs(y).max())
    np.testing.assert_array_equal(found[len(group) :], 0)


def test_terms_that_do_not_fit_are_refused():
    case, x = Case("whole"), draw(5, COLUMNS)
    for slots, message in (([4] * 5, "numbers of adapters"), ([1] * 4, "a slot per token")):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(products([case.call(x, np.asarray(slots, np.int32))]))

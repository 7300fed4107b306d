"""Drawn tokens: their distribution, what they may depend on, and what forces or forbids them."""

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest
from sampling_cases import any_rows, any_table, make_rows, make_table, take_rows
from scipy.stats import chisquare

from jaxserve.execution.lowering import known_options
from jaxserve.execution.sampling import sample, sampler
from jaxserve.execution.sampling.sampler import token_weights
from jaxserve.execution.step import step_options
from tests.own_programs import UNOPTIMIZED
from tests.parameters import mainly

BASE_SEED = np.uint32(42)
draw = jax.jit(sample, compiler_options=UNOPTIMIZED)
weigh = jax.jit(token_weights, compiler_options=UNOPTIMIZED)


def random_logits(shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.6}, {"temperature": 1.4, "top_k": 40}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 100}],
)
def test_draws_follow_the_distribution(fields):
    num_draws, vocab_size = 6000, 300
    logits = np.tile(random_logits((1, vocab_size), seed=1), (num_draws, 1))
    rows = make_rows(num_draws, seed=11, history_len=np.arange(num_draws), **fields)
    token_ids = np.asarray(draw(logits, rows, make_table(num_draws), BASE_SEED))
    probs = np.asarray(weigh(logits[:1], take_rows(rows, [0])))[0].astype(np.float64)
    expected = probs / probs.sum() * num_draws
    observed = np.bincount(token_ids, minlength=vocab_size)
    assert not observed[expected == 0].any()
    rare = expected < 5
    bins = np.stack([observed, expected])
    bins = np.concatenate([bins[:, ~rare], bins[:, rare].sum(1, keepdims=True)], 1)
    bins = bins[:, bins[1] > 0]
    assert chisquare(*bins).pvalue > 0.001


def test_draws_of_seeds_and_of_positions_are_independent():
    num_draws = 6000
    logits = np.full((num_draws, 300), -np.inf, np.float32)
    chosen = [7, 100, 150, 299]  # two of them in one block of the draw
    logits[:, chosen] = np.log([1, 2, 3, 4])
    seed = np.arange(num_draws)
    streams = [
        draw(logits, make_rows(num_draws, seed=s, history_len=p), make_table(num_draws), BASE_SEED)
        for s, p in [(seed, 0), (seed, 1), (seed + 1, 0), (seed << 32, 0)]
    ]
    probs = np.arange(1, 5) / 10
    for i, first in enumerate(streams):
        for second in streams[:i]:
            pairs = 4 * np.searchsorted(chosen, first) + np.searchsorted(chosen, second)
            observed = np.bincount(pairs, minlength=16)
            assert chisquare(observed, np.outer(probs, probs).ravel() * num_draws).pvalue > 0.001


def test_same_token_alone_in_a_batch_and_in_any_row():
    """Programs are optimised as those shipped, one for each number of rows."""
    rng, draw = np.random.default_rng(8), jax.jit(sample, compiler_options=known_options(step_options("cpu")))
    num_rows, vocab_size = 33, 300
    logits, rows = random_logits((num_rows, vocab_size)), any_rows(rng, num_rows)
    table = any_table(rng, num_rows, vocab_size)
    together = np.asarray(draw(logits, rows, table, BASE_SEED))
    shuffled = rng.permutation(num_rows)
    assert np.array_equal(together[shuffled], draw(logits[shuffled], take_rows(rows, shuffled), table, BASE_SEED))
    for r in np.nonzero(rows.live)[0]:
        assert together[[r]] == np.asarray(draw(logits[[r]], take_rows(rows, [r]), table, BASE_SEED))


@pytest.mark.parametrize("num_rows", mainly([17], 40, 150))
def test_same_token_however_many_rows_are_sampled_at_a_time(monkeypatch, num_rows):
    rng = np.random.default_rng(num_rows)
    at_once = max(num_rows, 64)
    logits, rows, table = random_logits((at_once, 300)), any_rows(rng, at_once), any_table(rng, at_once, 300)
    expected = draw(logits, rows, table, BASE_SEED)[:num_rows]
    logits, rows = logits[:num_rows], take_rows(rows, range(num_rows))
    monkeypatch.setattr(sampler, "target_platform", lambda: "tpu")
    by_blocks = jax.jit(partial(sample), compiler_options=UNOPTIMIZED)  # traced anew
    assert np.array_equal(by_blocks(logits, rows, table, BASE_SEED), expected)


def test_garbage_in_padding_rows_changes_nothing():
    rng = np.random.default_rng(9)
    logits, rows, table = random_logits((64, 300)), any_rows(rng, 64), any_table(rng, 64, 300)
    expected = draw(logits, rows, table, BASE_SEED)
    dead = ~np.asarray(rows.live)

    def spoil(x, value):
        x = np.asarray(x)
        return np.where(dead.reshape(-1, *[1] * (x.ndim - 1)), np.asarray(value).astype(x.dtype), x)

    for number, word in [(np.nan, 0x7FC00000), (np.inf, 0x7F800000), (-1e30, -1), (0, 2**31 - 1), (0, -(2**31))]:
        garbage = dataclasses.replace(
            rows, records=spoil(rows.records, word), history_len=spoil(rows.history_len, word)
        )
        token_ids = np.asarray(draw(spoil(logits, number), garbage, table, BASE_SEED))
        assert np.array_equal(token_ids[~dead], np.asarray(expected)[~dead])
        assert (token_ids >= 0).all()
        assert (token_ids < 300).all()


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_rows_take_the_first_of_the_largest_logits(temperature):
    logits = np.round(random_logits((64, 300)) * 2)
    rows = make_rows(64, temperature=np.where(np.arange(64) % 2, temperature, 1.0), top_k=3, top_p=0.1, min_p=0.5)
    token_ids = np.asarray(draw(logits, rows, make_table(64), BASE_SEED))
    assert np.array_equal(token_ids[1::2], logits[1::2].argmax(1))
    all_greedy = draw(logits, make_rows(64, temperature=temperature), make_table(64), BASE_SEED)
    assert np.array_equal(all_greedy, logits.argmax(1))


QUICK_SIZES = [(64, 300), (16, 1024)]


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [
        pytest.param(*sizes, marks=[] if sizes in QUICK_SIZES else pytest.mark.full)
        for sizes in [*itertools.product([1, 15, 16, 40], [64, 100, 1024]), (1, 300), (64, 300)]
    ],
)
def test_greedy_takes_the_first_of_the_most_likely(num_rows, vocab_size):
    logits = np.random.default_rng(0).integers(-3, 4, (num_rows, vocab_size)).astype(np.float32)  # many are equal
    logits[-1] = -np.inf
    rows = make_rows(num_rows, temperature=np.zeros(num_rows))
    assert np.array_equal(draw(logits, rows, make_table(64, vocab_size), BASE_SEED), logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_forces_and_bans(temperature):
    logits = random_logits((64, 300))
    rows = make_rows(64, temperature=temperature, use_bias=np.arange(64) % 2 == 0, history_len=np.arange(64))
    forced = np.asarray(draw(logits, rows, make_table(64, bias={77: 100.0}), BASE_SEED))
    plain = np.asarray(
        draw(logits, make_rows(64, temperature=temperature, history_len=np.arange(64)), make_table(64), BASE_SEED)
    )
    assert (forced[::2] == 77).all()
    assert np.array_equal(forced[1::2], plain[1::2])
    favourite = int(logits[0].argmax())
    same = np.tile(logits[:1], (64, 1))
    banned = np.asarray(draw(same, rows, make_table(64, bias={favourite: -100.0}), BASE_SEED))
    assert favourite not in banned[::2]
    assert favourite in banned[1::2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_the_fewest_tokens(temperature):
    logits = random_logits((64, 300))
    logits[:, [4, 290]] = 30.0
    rows = make_rows(64, temperature=temperature, history_len=np.arange(64), min_history_len=10)
    stopped = np.isin(np.asarray(draw(logits, rows, make_table(64, stop_ids=[4, 290]), BASE_SEED)), [4, 290])
    assert np.array_equal(stopped, np.arange(64) >= 10)


def test_masked_logits_are_never_drawn():
    logits = np.full((64, 300), -np.inf, np.float32)
    logits[:, [3, 150, 299]] = [0.0, -1.0, 1.0]
    rows = make_rows(64, temperature=50.0, history_len=np.arange(64))
    assert set(np.asarray(draw(logits, rows, make_table(64), BASE_SEED)).tolist()) == {3, 150, 299}


@pytest.mark.parametrize("vocab_size", mainly([1], 127, 129))
def test_any_vocabulary_size(vocab_size):
    logits = np.zeros((300, vocab_size), np.float32)
    rows = make_rows(300, history_len=np.arange(300), top_k=vocab_size, top_p=0.99999)
    token_ids = np.asarray(draw(logits, rows, make_table(300, vocab_size), BASE_SEED))
    assert token_ids.min() >= 0
    assert token_ids.max() < vocab_size
    assert len(set(token_ids.tolist())) > min(vocab_size, 100) // 2


def test_sampling_parameters_trace_nothing_new():
    """A call of the same shapes has the jaxpr of the first."""
    jaxprs = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        rows = any_rows(rng, 64) if seed else make_rows(64, temperature=0.0)
        jaxprs.append(draw.trace(random_logits((64, 300)), rows, any_table(rng, 64, 300), BASE_SEED).jaxpr)
    assert all(jaxpr is jaxprs[0] for jaxpr in jaxprs)


def primitives(jaxpr, inside_cond=True):
    """Yield names of a jaxpr's primitives, entering calls and platform branches, and each `cond` if asked."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name == "cond" and not eqn.params.get("branches_platforms") and not inside_cond:
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner, inside_cond)


COSTLY = {"exp", "log", "while", "scatter-add", "gather"}


def test_costly_work_stands_under_cond_and_nothing_sorts():
    jaxpr = draw.trace(random_logits((64, 300)), make_rows(64), make_table(64), BASE_SEED).jaxpr.jaxpr
    assert not {"sort", "top_k", "cumsum", "approx_top_k"} & set(primitives(jaxpr))
    assert set(primitives(jaxpr)) >= COSTLY
    always = set(primitives(jaxpr, inside_cond=False))
    assert not COSTLY & always
    assert "cond" in always


def test_compiled_program_keeps_the_conditionals_and_few_copies():
    num_rows, vocab_size = 16, 1024
    args = (random_logits((num_rows, vocab_size)), make_rows(num_rows), make_table(64, vocab_size), BASE_SEED)
    compiled = draw.lower(*args).compile()
    assert compiled.as_text().count(" conditional(") >= 4
    assert "f64[" not in compiled.as_text()
    assert "s64[" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * num_rows * vocab_size * 4

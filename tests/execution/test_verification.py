"""Cost and random draws of speculative rounds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jaxserve.api.config import EngineConfig
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.api.token_tree import TokenTree
from jaxserve.assembly.memory import activation_bytes
from jaxserve.execution.batch import BatchLayout
from jaxserve.execution.lowering import known_options
from jaxserve.execution.proposer import Drafts
from jaxserve.execution.round import Model, plain_round
from jaxserve.execution.rows import Rows
from jaxserve.execution.sampling import DRAFT, DraftedTokens, SamplingRows, draw_by_weight, pack_records
from jaxserve.execution.sampling.random_bits import ACCEPT, RESIDUAL, TARGET, uniform_noise
from jaxserve.execution.sampling.sampler import accept_or_draw
from jaxserve.execution.state import Lengths, abstract_state, new_state
from jaxserve.execution.verification import _verify, make_speculative_step, round_words
from jaxserve.models import decoder, registry
from jaxserve.scheduling.executor_protocol import RoundCounts
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.spec_decode.draft_model import DraftModel
from jaxserve.tools.planner.program import abstract_params, temp_bytes
from tests.checkpoints import hf_dict
from tests.simulation import make_request
from tests.soon_compiled import unoptimized

R, K = 8, 4
SOON = known_options(unoptimized("cpu"))  # options with which the same buffers and accesses are compiled faster


@pytest.mark.long
def test_verification_reads_the_weights_once() -> None:
    """XLA counts the bytes of a plain step of 8 rows, and of the pass over 8 rows with 4 drafted tokens each."""
    arch = registry.from_hf_config(
        hf_dict("llama", vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=1)
    )
    schedule = ScheduleConfig(R, 64, 64, 4, 160)
    params = abstract_params(arch, jnp.dtype("float32"))
    state = abstract_state(arch, schedule, kv_dtype=jnp.float32, backend="xla")
    model = Model.from_arch(arch, backend="xla")
    layout = BatchLayout.from_config(schedule, R)

    def plain(params, state, blob):
        return plain_round(params, state, layout.unpack(blob), jnp.int32(0), model)

    def verify(params, state, drafts):
        ones = jnp.ones(R, jnp.int32)
        rows = Rows.packed(jnp.arange(R), state.sequences.lengths(jnp.arange(R)), ones, ones > 0)
        logits, _, state = _verify(params, state, rows, drafts, jnp.int32(R), model, None)
        return state, logits

    drafts = jax.eval_shape(lambda: Drafts(jnp.zeros((R, K), jnp.int32), jnp.zeros(R, jnp.int32), None))
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    num_bytes = [
        jax.jit(program, donate_argnums=1).lower(params, state, last).compile(SOON).cost_analysis()["bytes accessed"]
        for program, last in ((plain, blob), (verify, drafts))
    ]
    assert num_bytes[1] < 1.1 * num_bytes[0], num_bytes


@pytest.mark.long
def test_memory_kept_free_holds_the_logits_of_all_drafted_tokens() -> None:
    """A round of a model with a large vocabulary, whose draft model draws a chain."""
    num_rows = 16
    arch = registry.from_hf_config(
        hf_dict("llama", vocab_size=1 << 16, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    )
    schedule = ScheduleConfig(num_rows, 64, 64, 4, 160, max_drafts=K)
    draft_arch = replace(arch, one_kv_group=True)
    proposer = DraftModel(K, draft_arch, arch.vocab_size, schedule, "float32", "xla", kv_group=0, chunk=64)
    layout = BatchLayout.from_config(schedule, num_rows, is_speculative=True)
    program = make_speculative_step(Model.from_arch(arch, backend="xla"), layout, proposer, 2)
    state = abstract_state(arch, schedule, kv_dtype=jnp.float32, backend="xla", new_draft=proposer.new_state)
    params = (abstract_params(arch, jnp.dtype("float32")),) * 2
    blob = jax.ShapeDtypeStruct((layout.blob.size,), jnp.int32)
    compiled = jax.jit(program, donate_argnums=1).lower(params, state, blob).compile(SOON)
    sizes = {"max_num_seqs": num_rows, "max_num_batched_tokens": 64, "max_logprobs": 0}
    drafting = SpeculationConfig(model="draft", num_speculative_tokens=K)
    kept = [activation_bytes(EngineConfig(speculative_config=each, **sizes), arch) for each in (None, drafting)]
    assert temp_bytes(compiled) <= kept[1]
    assert kept[1] - kept[0] == 4 * (8 * (K + 1) - 4) * num_rows * arch.vocab_size


def test_padding_has_no_experts_of_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = replace(registry.from_hf_config(hf_dict("olmoe")), one_kv_group=True)
    schedule = ScheduleConfig(R, 64, 64, 4, 16)
    proposer = DraftModel(K, arch, arch.vocab_size, schedule, "float32", "xla", kv_group=0, chunk=64)
    state = new_state(arch, schedule, kv_dtype=jnp.float32, backend="xla", new_draft=proposer.new_state)
    start, q_lens, live = jnp.arange(R), jnp.array([2, 0, 1] + [0] * (R - 3)), []

    def forward(params, arch, token_ids, tokens):
        live.append(tokens.live)
        return jnp.zeros((token_ids.size, arch.hidden_size)), tokens

    monkeypatch.setattr(decoder, "forward", forward)
    start = Lengths(start, start, start)
    rows, drafted = Rows.packed(jnp.arange(R), start, q_lens, q_lens > 0), jnp.zeros((R, 1), jnp.int32)
    proposer._forward({}, state, rows, start, drafted, state.draft.kv_pages, 8)
    np.testing.assert_array_equal(live, [np.arange(8) < 3])


def test_a_draft_model_computes_no_node_of_a_tree_that_a_sequence_has_no_page_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind its pages lie those of others, and behind the page table anything."""
    arch = replace(registry.from_hf_config(hf_dict("llama")), one_kv_group=True)
    schedule, paths = ScheduleConfig(R, 64, 64, 4, 16), [(0,) * n for n in range(1, K + 1)]
    tree = TokenTree.from_paths([*paths, *((1, *path) for path in ((), *paths[:-1])), (2,), (3,)])
    proposer = DraftModel(K, arch, arch.vocab_size, schedule, "float32", "xla", kv_group=0, chunk=64, tree=tree)
    state = new_state(arch, schedule, kv_dtype=jnp.float32, backend="xla", new_draft=proposer.new_state)
    max_len, left = jnp.full(R, 64), jnp.array([1, 2, 3, 4, 5, 6, 12, 40])  # tokens that each may have yet
    length = max_len - 1 - left
    sequences = replace(state.sequences, length=length, admitted=state.sequences.admitted.at[0].set(max_len))
    draft = replace(state.draft, length=length)
    ends = []

    def forward(self, params, state, rows, last, drafted, kv_pages, num_tokens, words=None):
        jax.debug.callback(lambda end: ends.append(np.asarray(end)), jnp.where(rows.q_lens > 0, rows.end.cached, 0))
        return jnp.zeros((num_tokens, arch.hidden_size)), kv_pages

    monkeypatch.setattr(DraftModel, "_forward", forward)
    monkeypatch.setattr(DraftModel, "_logits", lambda self, params, hidden: jnp.zeros((len(hidden), arch.vocab_size)))
    state = replace(state, sequences=sequences, draft=draft)
    rows = Rows.packed(jnp.arange(R), sequences.lengths(jnp.arange(R)), jnp.ones(R, jnp.int32), left > 0)
    proposer.propose(({}, {}), state, rows, jnp.minimum(left - 1, K), jnp.uint32(0))
    jax.effects_barrier()
    assert len(ends) == K
    assert np.max(ends) == 63, "the last token of a sequence is never computed"
    assert np.max(ends, axis=0)[-1] == length[-1] + 1 + tree.num_within[K - 1], (
        "all but the last level where there are pages"
    )


def test_round_words_hold_all_counts() -> None:
    counts = np.random.default_rng(0).integers(0, 33, (4, 35)).astype(np.int32)
    words = np.asarray(round_words(*map(jnp.asarray, counts)))
    assert np.array_equal(np.stack(RoundCounts.unpack(words)), counts)


@pytest.mark.long
@pytest.mark.parametrize("case", ["any", "same", "disjoint"])
def test_tokens_have_the_target_s_distribution_whatever_was_drafted(case: str) -> None:
    """Modified rejection sampling of 40,000 rows with seeds of their own, against the exact probabilities."""
    num_rows, rng = 40_000, np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(6), 2).astype(np.float32)
    if case == "same":
        q = p
    elif case == "disjoint":
        p, q = np.where(np.arange(6) < 3, p, 0), np.where(np.arange(6) < 3, 0, q)
    rows = seeded_rows(num_rows)
    weights, drafted = (jnp.broadcast_to(jnp.asarray(x), (num_rows, 6)) for x in (p / p.max(), q * 3))
    base_seed = jnp.uint32(5)
    ids = draw_by_weight(drafted, rows, base_seed, DRAFT)
    draft = DraftedTokens(ids, jnp.ones(num_rows, bool), drafted)
    tokens = np.asarray(jax.jit(partial(accept_or_draw, base_seed=base_seed))(weights, rows, drafted=draft))
    counts = np.bincount(tokens, minlength=6)
    assert not counts[p == 0].any()
    assert chisquare(counts[p > 0], (p / p.sum() * num_rows)[p > 0], sum_check=False).pvalue > 0.01
    num_kept = int((tokens == np.asarray(ids)).sum())
    if case == "same":
        assert num_kept == num_rows, "min(1, p / q) is 1"
    else:
        expected = float(np.minimum(p / p.sum(), q / q.sum()).sum()) * num_rows
        assert abs(num_kept - expected) < 4 * num_rows**0.5


def test_draws_of_a_position_have_streams_of_their_own() -> None:
    """Uniform noise for target, draft, residual and acceptance, of neighbouring seeds and positions."""
    num_rows, count = 64, 256
    rows = seeded_rows(num_rows)
    noise = [
        uniform_noise(rows.seed, rows.history_len + shift, jnp.uint32(5), count, stream)
        for stream in (TARGET, DRAFT, RESIDUAL, ACCEPT)
        for shift in (0, 1)
    ]
    flat = np.asarray(jnp.stack(noise)).reshape(len(noise) * num_rows, count)
    assert len(np.unique(flat[:, 0])) == len(flat)
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlation).max() < 6 / count**0.5


def seeded_rows(num_rows: int) -> SamplingRows:
    """Return rows that sample at temperature 1, each with a seed of its own."""
    requests = [make_request("a", [1])]
    records = np.repeat(pack_records(requests), num_rows, axis=0)
    seeded = make_request("b", [1])
    seeded.seed = 1
    place = int(np.flatnonzero(pack_records([seeded])[0] != records[0])[0])
    records[:, place] = np.arange(num_rows)
    history_len = jnp.full(num_rows, 9, jnp.int32)
    return SamplingRows(jnp.asarray(records), history_len, jnp.ones(num_rows, bool))

"""Acceptance of drafts: as many as their proposer, chain or tree makes right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.events import DraftsAllowed
from tests.e2e.proposers import GREEDY, TREE, hidden_size, write_heads, write_with_other_ids
from tests.e2e.workloads import assert_same, generate, tokens

Start = Callable[..., DrivenEngine]


@pytest.mark.parametrize(
    "num_tokens", [pytest.param(n, marks=pytest.mark.full if n != 3 else []) for n in (1, 2, 3, 4, 8)]
)
@pytest.mark.long
def test_a_draft_that_is_right_saves_target_passes(
    start: Start, speculate: Callable[..., SpeculationConfig], num_tokens: int
) -> None:
    """Each round yields all drafted tokens and one more; only the last one may have fewer."""
    engine = start(speculative_config=speculate("same", num_tokens), multi_step=8)
    prompt, expected = tokens(5, "right"), generate(start(), [tokens(5, "right")], GREEDY)
    before = replace(engine.stats)
    assert_same(*generate(engine, [prompt], GREEDY), *expected)
    stats = engine.stats.since(before)
    assert GREEDY.max_tokens is not None
    num_rounds = -(-(GREEDY.max_tokens - 1) // (num_tokens + 1))  # the first token comes from the prompt
    assert stats.num_steps == 1 + num_rounds
    assert stats.num_accepted_tokens == GREEDY.max_tokens - 1 - num_rounds
    assert sum(stats.accepted_per_position.values) == stats.num_accepted_tokens
    assert stats.acceptance_rate == 1
    [again] = generate(engine, [prompt], GREEDY)
    metrics = again.outputs[0].metrics
    assert metrics.num_draft_rounds == stats.num_draft_rounds <= num_rounds
    assert metrics.num_accepted_tokens == metrics.num_drafted_tokens == stats.num_accepted_tokens
    assert sum(metrics.num_accepted_per_position) == metrics.num_accepted_tokens
    assert len(metrics.num_accepted_per_position) == num_tokens
    drafted = engine.stats.num_drafted_tokens
    engine.core.inbox.append(DraftsAllowed(False))
    assert_same(*generate(engine, [prompt], GREEDY), *expected)
    assert engine.stats.num_drafted_tokens == drafted
    engine.core.inbox.append(DraftsAllowed(True))
    assert_same(*generate(engine, [prompt], GREEDY), *expected)
    assert engine.stats.num_drafted_tokens > drafted


@pytest.mark.full
def test_a_tree_of_a_draft_that_is_right_saves_target_passes(
    start: Start, speculate: Callable[..., SpeculationConfig]
) -> None:
    """Each round accepts the path of the most likely tokens, whose nodes are not next to each other.

    All but the last rounds yield 4 tokens; the pages of a sequence end where it does, so that those draft fewer nodes.
    """
    engine = start(speculative_config=speculate("same", 3, speculative_token_tree=TREE))
    prompt, expected = tokens(5, "right"), generate(start(), [tokens(5, "right")], GREEDY)
    before = replace(engine.stats)
    assert_same(*generate(engine, [prompt], GREEDY), *expected)
    stats = engine.stats.since(before)
    assert stats.num_steps == 1 + 5 + 2 + 1
    assert stats.acceptance_rate == 1


@pytest.mark.full
def test_a_tree_accepts_tokens_that_a_chain_misses(start: Start, speculate: Callable[..., SpeculationConfig]) -> None:
    rates = []
    for tree in ([(0,), (0, 0)], [(0,), (0, 0), (1,), (2,), (0, 1), (1, 0)]):
        engine = start(speculative_config=speculate("tree", 2, speculative_token_tree=tree))
        before = replace(engine.stats)
        generate(engine, [tokens(6, i) for i in range(8)], GREEDY)
        rates.append(engine.stats.since(before).acceptance_rate)
    assert rates[1] > 1.1 * rates[0]


@pytest.mark.full
def test_a_random_draft_is_hardly_ever_accepted(start: Start, speculate: Callable[..., SpeculationConfig]) -> None:
    engine = start(speculative_config=speculate("other"), multi_step=8)
    before = replace(engine.stats)
    generate(engine, [tokens(6, i) for i in range(4)], GREEDY)
    stats = engine.stats.since(before)
    assert stats.num_drafted_tokens > 50
    assert stats.acceptance_rate < 0.1


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.long
def test_heads_read_the_hidden_state_after_the_last_token(
    start: Start, llama: Path, tmp_path: Path, num_tokens: int
) -> None:
    """Heads of zeros propose what the model itself sampled last; so they are right where tokens repeat."""
    write_heads(tmp_path, hidden_size(llama), lambda size: np.zeros((size, size), np.float32))
    heads = SpeculationConfig("medusa", str(tmp_path), num_speculative_tokens=num_tokens, adaptive=False)
    engine, plain = start(speculative_config=heads, step_ahead=False, max_num_seqs=1), start()
    num_repeated = 0
    for index in range(6):
        prompt, params = tokens(5 + index, f"heads {index}"), replace(GREEDY, max_tokens=40)
        [expected], before = generate(plain, [prompt], params), replace(engine.stats)
        [output] = generate(engine, [prompt], params)
        assert_same(output, expected)
        num_accepted = engine.stats.since(before).num_accepted_tokens
        ids, last, wanted = expected.outputs[0].token_ids, 0, 0
        while last < len(ids) - 1:
            most = min(num_tokens, len(ids) - last - 2)
            run = next((n for n in range(most) if ids[last + 1 + n] != ids[last]), most)
            wanted, last = wanted + run, last + run + 1
        assert num_accepted == wanted
        num_repeated += num_accepted
    assert num_repeated


@pytest.mark.full
def test_a_draft_with_the_same_tokens_under_other_ids_is_as_good(
    start: Start, speculate: Callable[..., SpeculationConfig], llama: Path, tmp_path: Path
) -> None:
    """Its tokens are read and proposed by their text."""
    write_with_other_ids(llama, tmp_path)
    config = speculate("same", model=str(tmp_path))
    engine, before = start(speculative_config=config, skip_tokenizer_init=False, multi_step=8), None
    for index in range(4):
        prompt = tokens(4 + index, f"other ids {index}")
        before = replace(engine.stats)
        [output] = generate(engine, [prompt], GREEDY)
        assert_same(output, *generate(start(), [prompt], GREEDY))
        assert engine.stats.since(before).acceptance_rate == 1


@pytest.mark.parametrize(
    "proposer", [pytest.param("same", marks=pytest.mark.long), pytest.param("other", marks=pytest.mark.full)]
)
def test_numbers_of_drafts_change_and_compile_nothing(
    start: Start, speculate: Callable[..., SpeculationConfig], proposer: str
) -> None:
    """Plain steps, the most drafts and half of them are tried before any choice; fixtures forbid compilations."""
    config = replace(speculate(proposer), adaptive=True)
    engine, plain, drafted = start(speculative_config=config, multi_step=8), start(), set()
    for index in range(3):
        prompt, params = tokens(5, f"adaptive {index}"), replace(GREEDY, max_tokens=40)
        output = engine.add_request(f"adaptive {index}", prompt, params)
        while engine.has_unfinished():
            engine.step()
            steps = [step for step in engine.core.last_steps if not step.num_prefill_tokens]
            drafted |= {step.num_drafted_tokens / max(step.num_draft_rounds, 1) for step in steps}
        assert_same(output, *generate(plain, [prompt], params))
    assert drafted >= {0, 1, 3}
    assert engine.stats.num_compiles == 0

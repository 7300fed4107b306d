"""Models with delta nets or Mamba-2: the invariants of the whole engine, whose slots have states beside their pages."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from hypothesis import given, settings

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from tests.e2e.sizes import EOS, VOCAB_SIZE
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, run, run_alone, tokens
from tests.parameters import some_by_default
from tests.random_runs import examples

Start = Callable[..., DrivenEngine]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
LAYERS = ["linear_attention", "full_attention"]


@pytest.fixture(scope="module", params=some_by_default(["qwen3_5", "granite_moe_hybrid"], "qwen3_5"))
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint of a layer of each kind."""
    family: str = request.param
    path: Path = tmp_path_factory.mktemp(family)
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": EOS}
    checkpoints.write_checkpoint(path, family, num_hidden_layers=len(LAYERS), layer_types=LAYERS, **sizes)
    return str(path)


class TestAnyWorkload:
    """Batches, chunks, prefix hits, preemptions and several steps at once."""

    @pytest.mark.full
    @pytest.mark.parametrize(
        "options", [{}, {"step_ahead": False}, {"enable_prefix_caching": False}, {"multi_step": 8}], ids=str
    )
    @given(jobs=jobs())
    @settings(few_but_rich, max_examples=examples(4))
    def test_batched_tokens_equal_those_of_each_request_alone(
        self, start: Start, hybrid: str, options: dict[str, Any], jobs: list[Job]
    ) -> None:
        alone = start(model=hybrid, max_num_batched_tokens=64, step_ahead=False)
        expected = [run_alone(alone, job) for job in jobs]
        for output, wanted, job in zip(run(start(model=hybrid, **options), jobs), expected, jobs, strict=True):
            assert_same(output, wanted, job)


@pytest.mark.long
def test_chunked_preempted_and_cached_is_whole(start: Start, hybrid: str) -> None:
    prompts = [tokens(22, n) for n in range(4)]
    whole = start(model=hybrid, max_num_batched_tokens=64, step_ahead=False)
    alone = [run_alone(whole, Job(prompt, GREEDY)) for prompt in prompts]
    engine = start(model=hybrid)
    before = engine.stats.num_preemptions
    for _ in range(2):
        for output, wanted in zip(generate(engine, prompts, GREEDY), alone, strict=True):
            assert_same(output, wanted)
    assert engine.stats.num_preemptions > before
    engine.check_integrity()


@pytest.mark.long
def test_state_snapshots_are_taken_at_prompt_ends_and_common_prefixes(start: Start, hybrid: str) -> None:
    engine, prompt = start(model=hybrid), tokens(41, "cached")
    params = replace(GREEDY, max_tokens=5)

    def num_cached(prompt: list[int]) -> int:
        (output,) = generate(engine, [prompt], params)
        num_cached = output.num_cached_tokens
        assert_same(output, run_alone(start(model=hybrid, max_num_batched_tokens=64), Job(prompt, params)))
        return num_cached

    assert [num_cached(prompt) for _ in range(2)] == [0, 40]
    assert [num_cached(prompt[:22] + tokens(9, n)) for n in range(3)] == [0, 20, 20]
    engine.reset_prefix_cache()
    assert num_cached(prompt) == 0


def test_drafts_are_refused(start: Start, hybrid: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention in all layers.* cannot undo rejected drafts, got .*ForCausalLM"):
        start(model=hybrid, speculative_config=SpeculationConfig(method="ngram", num_speculative_tokens=2))
    checkpoints.write_checkpoint(tmp_path, "llama", vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    with pytest.raises(ConfigError, match="take another draft model"):
        start(model=str(tmp_path), speculative_config=SpeculationConfig(model=hybrid, num_speculative_tokens=2))

"""Models whose pools differ: the invariants of the whole engine, with latents and with KV heads of two sizes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
from hypothesis import given, settings

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from tests.e2e.sizes import EOS, VOCAB_SIZE
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, run, run_alone, tokens
from tests.random_runs import examples

Start = Callable[..., DrivenEngine]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
pytestmark = pytest.mark.full


FAMILIES = {"deepseek_v3": {}, "glm_moe_dsa": {}, "gemma4": {"vocab_size_per_layer_input": VOCAB_SIZE}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint: DeepSeek-V3 and GLM-5 have an MLP in the first layer, Gemma 4 has layers that share keys."""
    path: Path = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": EOS}
    checkpoints.write_checkpoint(path, request.param, **sizes, **FAMILIES[request.param])
    return str(path)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("pages"))


class TestAnyWorkload:
    """Batches, chunks, prefix hits, preemptions, drafts and several steps at once."""

    @given(jobs=jobs())
    @settings(few_but_rich, max_examples=examples(4))
    def test_batched_tokens_equal_those_of_each_request_alone(self, start: Start, model: str, jobs: list[Job]) -> None:
        alone = start(model=model, max_num_batched_tokens=64, step_ahead=False)
        expected = [run_alone(alone, job) for job in jobs]
        for output, wanted, job in zip(run(start(model=model), jobs), expected, jobs, strict=True):
            assert_same(output, wanted, job)

    @given(jobs=jobs())
    @settings(few_but_rich, max_examples=examples(4))
    def test_greedy_tokens_equal_plain_decoding(self, start: Start, model: str, jobs: list[Job]) -> None:
        jobs = [replace(job, params=replace(job.params, temperature=0)) for job in jobs]
        expected = run(start(model=model), jobs)
        own = SpeculationConfig(model=model, num_speculative_tokens=3, adaptive=False)
        for output, wanted, job in zip(
            run(start(model=model, speculative_config=own, multi_step=8), jobs), expected, jobs, strict=True
        ):
            assert_same(output, wanted, job)


class TestPagesOnDisk:
    """Latents, KV heads of two sizes and windows come back from disk as they were."""

    @given(jobs=jobs())
    @settings(few_but_rich, max_examples=examples(8))
    def test_any_workload_gives_the_same_tokens(self, start: Start, model: str, pages: str, jobs: list[Job]) -> None:
        expected = run(start(model=model), jobs)
        engine = start(model=model, kv_offloading_path=pages)
        for output, wanted, job in zip(run(engine, jobs), expected, jobs, strict=True):
            assert_same(output, wanted, job)


def test_a_tree_of_drafts_moves_tokens(start: Start, model: str, tmp_path: Path) -> None:
    """Drafts of another model are seldom right, so that accepted tokens leave their places in the tree."""
    checkpoints.write_checkpoint(tmp_path, "llama", seed=7, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    prompts = [tokens(n, f"tree {n}") for n in (3, 9, 17)]
    expected = generate(start(model=model), prompts, GREEDY)
    tree = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1)]
    for draft in (model, str(tmp_path)):
        own = SpeculationConfig(model=draft, num_speculative_tokens=3, speculative_token_tree=tree, adaptive=False)
        if draft == model and "gemma4" in model:
            with pytest.raises(ConfigError, match="drafts a tree must have KV heads of one size"):
                start(model=model, speculative_config=own)
            continue
        engine = start(model=model, speculative_config=own)
        for output, wanted in zip(generate(engine, prompts, GREEDY), expected, strict=True):
            assert_same(output, wanted, draft)


def test_preempted_is_undisturbed_and_pages_come_back(start: Start, model: str) -> None:
    prompts = [tokens(20, n) for n in range(4)]
    engine = start(model=model)
    alone = [generate(engine, [prompt], GREEDY)[0] for prompt in prompts]
    engine.reset_prefix_cache()
    before = engine.stats.num_preemptions
    for output, wanted in zip(generate(engine, prompts, GREEDY), alone, strict=True):
        assert_same(output, wanted)
    assert engine.stats.num_preemptions > before
    engine.check_integrity()

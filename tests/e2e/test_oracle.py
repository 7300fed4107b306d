"""Every family through the whole engine against transformers in float32, on checkpoints that transformers wrote."""

import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import transformers
from checkpoints import ROPES, reference_logits
from scipy.special import log_softmax

from jaxserve.api.outputs import Logprob, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from jaxserve.pallas_kernels import native
from jaxserve.scheduling.step_plan import StepPlan, StepShape
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import TOLERANCE, generate, tokens

Start = Callable[..., DrivenEngine]

# `sliding` layers are shorter than the prompts; `max_window_layers` of qwen2 leaves its first layer without one.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3-tied": ("llama", {"rope_parameters": ROPES["llama3"], "tie_word_embeddings": True}),
    "llama-linear-bias": ("llama", {"rope_parameters": ROPES["linear"], "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {}),
    "qwen2-window-of-some": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma4": ("gemma4", {}),
    "gemma4-moe": ("gemma4_moe", {}),
    "gpt2": ("gpt2", {}),
    "gpt-neo": ("gpt_neo", {}),
    "granite-swa": ("granite_swa", {}),
    "granite-moe": ("granite_moe", {}),
    "granite-moe-shared": ("granite_moe_shared", {}),
    "granite-4": ("granite_moe_hybrid", {"position_embedding_type": "rope", "layer_types": ["full_attention"] * 2}),
    "granite-4-h": ("granite_moe_hybrid", {}),
    "granite-4-h-dense": ("granite_moe_hybrid", {"num_experts": 0, "mamba_n_groups": 1}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "olmoe": ("olmoe", {}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v3": ("deepseek_v3", {}),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "deepseek-v3.2": ("deepseek_v32", {}),
    "glm-5": ("glm_moe_dsa", {}),
    "gpt-oss": ("gpt_oss", {}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3.5-moe": ("qwen3_5_moe", {}),
    "phi3": ("phi3", {"original_max_position_embeddings": SIZES["max_model_len"]}),
    "smollm3": ("smollm3", {}),
    "seed-oss": ("seed_oss", {}),
    "arcee": ("arcee", {}),
    "ministral3": ("ministral3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "phi": ("phi", {}),
    "starcoder2": ("starcoder2", {}),
}
NUM_OUTPUT = 9
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=4, prompt_logprobs=2)
# One chunk, several chunks, chunk and page edges, one token; together they fill the budget unevenly.
PROMPTS = [tokens(n, n) for n in (7, 40, 16, 1, 33)]


class Oracle:
    """Results of transformers, by sequence."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.has_states = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
        self.logprobs = functools.cache(lambda ids: log_softmax(reference_logits(model, np.array(ids)), axis=-1))

    def check_greedy(self, output: RequestOutput, count: int = NUM_OUTPUT) -> None:
        """Check that there are so many tokens, each the most likely one behind those before it."""
        prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
        assert ids == self.logprobs(tuple(prompt + ids))[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(ids) == count

    def check(self, output: RequestOutput) -> None:
        """Return greedy ids, and all log probabilities that came with them."""
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        self.check_greedy(output)
        expected = self.logprobs(tuple(prompt + completion.token_ids))
        for row, entry in zip(expected[len(prompt) - 1 :], completion.logprobs, strict=False):
            self.check_entry(entry, row, 4)
        total = sum(row[i] for row, i in zip(expected[len(prompt) - 1 :], completion.token_ids, strict=False))
        assert completion.cumulative_logprob == pytest.approx(total, abs=TOLERANCE * NUM_OUTPUT)
        self.check_prompt(output)

    def check_prompt(self, output: RequestOutput, top: int = 2) -> None:
        prompt, entries = output.prompt_token_ids, output.prompt_logprobs
        assert entries[0] is None
        assert [next(iter(entry)) for entry in entries[1:]] == prompt[1:]
        for row, entry in zip(self.logprobs(tuple(prompt)), entries[1:], strict=False):
            self.check_entry(entry, row, top)

    def check_entry(self, entry: dict[int, Logprob], row: np.ndarray, top: int) -> None:
        """Return the token itself first, then the most likely ones, best first; ranks count from 1."""
        chosen, *_ = entry
        best = np.argsort(-row, kind="stable")[:top].tolist()
        assert list(entry) == [chosen] + [i for i in best if i != chosen]
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token_id], abs=TOLERANCE)
            assert logprob.rank == 1 + int((row > row[token_id]).sum())


# Models with windows are in test_window_pages.py too, and every family is in tests/models/test_parity.py.
QUICK = {"native": ("llama",), "xla": ("llama",)}
KERNELS = ["native", "xla"] if native.unavailable() is None else ["xla"]


def pairs(quick: Callable[[str, str], bool]) -> list[Any]:
    """Return parameters for each checkpoint and kernels."""
    every = [(name, kernels) for kernels in KERNELS for name in ("llama", *CHECKPOINTS)]
    return [pytest.param(p, id="-".join(p), marks=() if quick(*p) else pytest.mark.full) for p in every]


@pytest.fixture(scope="session", params=pairs(lambda name, kernels: name in QUICK[kernels]))
def pair(
    request: pytest.FixtureRequest,
    start: Start,
    oracle: transformers.PreTrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Callable[..., DrivenEngine], Oracle]:
    """Return a starter of an engine with an empty cache, and the oracle of the same checkpoint."""
    name, kernels = request.param
    model: transformers.PreTrainedModel = oracle
    options: dict[str, Any] = {}
    if name != "llama":
        family, overrides = CHECKPOINTS[name]
        path: Path = tmp_path_factory.mktemp(family)
        model = checkpoints.write_checkpoint(path, family, **overrides)
        options = {"model": str(path), "num_pages": 2 * SIZES["num_pages"]}  # some have two KV groups
    if kernels == "xla":
        options |= {"attention_backend": "xla", "linear_backend": "xla"}
    return lambda **more: start(**options | more), Oracle(model)


def test_ragged_batch_in_chunks(pair: tuple[Callable[..., DrivenEngine], Oracle]) -> None:
    start, oracle = pair
    for output in generate(start(), PROMPTS, GREEDY):
        oracle.check(output)


def test_a_sequence_takes_all_learned_positions(start: Start, tmp_path: Path) -> None:
    oracle = Oracle(checkpoints.write_checkpoint(tmp_path, "gpt2", max_position_embeddings=44))
    with pytest.raises(ConfigError, match=r"max_model_len must be at most .* got 45 and 44"):
        start(model=str(tmp_path), max_model_len=45)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    (output,) = generate(start(model=str(tmp_path), max_model_len=44), [tokens(40, "positions")], params)
    oracle.check_greedy(output, 4)
    assert output.outputs[0].finish_reason == "length"


def test_prefix_hits(pair: tuple[Callable[..., DrivenEngine], Oracle]) -> None:
    start, oracle = pair
    engine = start()
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=4)
    generate(engine, PROMPTS[1:2], params)
    prompts = [PROMPTS[1][:n] + tokens(3, n) for n in (40, 21, 38)]
    outputs = generate(engine, prompts, params)
    # Snapshots of states lie behind the last page before the last token of a prompt.
    assert [output.num_cached_tokens for output in outputs] == ([36, 0, 36] if oracle.has_states else [40, 20, 36])
    for output in outputs:
        oracle.check_greedy(output)
        expected = oracle.logprobs(tuple(output.prompt_token_ids + output.outputs[0].token_ids))
        for row, entry in zip(expected[len(output.prompt_token_ids) - 1 :], output.outputs[0].logprobs, strict=False):
            oracle.check_entry(entry, row, 4)


# By default with the best kernels alone: to attention, drafted tokens are a chunk.
@pytest.mark.parametrize("pair", pairs(lambda *pair: pair in product(QUICK["native"], KERNELS[:1])), indirect=True)
def test_drafts_and_preemption(pair: tuple[Callable[..., DrivenEngine], Oracle]) -> None:
    start, oracle = pair
    lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    drafts = None if oracle.has_states else SpeculationConfig(num_speculative_tokens=3, adaptive=False, **lookup)
    engine = start(speculative_config=drafts, multi_step=8, num_pages=SIZES["num_pages"])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [tokens(7, n) * 4 for n in range(4)]
    before = engine.stats.num_preemptions
    outputs = generate(engine, prompts, params)
    # Where every layer has a window, pages are given back in time.
    is_limited = engine.schedule.kv_groups.max_tokens(SIZES["num_pages"]) is not None
    assert (engine.stats.num_preemptions > before) == is_limited
    for output in outputs:
        oracle.check_greedy(output, 24)


def test_prompt_logprobs_of_a_cached_prompt(pair: tuple[Callable[..., DrivenEngine], Oracle]) -> None:
    start, oracle = pair
    engine = start()
    for _ in range(2):
        for output in generate(engine, PROMPTS, GREEDY):
            oracle.check(output)


def test_prompt_logprobs_of_several_samples(pair: tuple[Callable[..., DrivenEngine], Oracle]) -> None:
    start, oracle = pair
    params = SamplingParams(n=3, seed=3, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=1)
    (output,) = generate(start(), [tokens(37, "n")], params)
    oracle.check_prompt(output, top=1)
    for completion in output.outputs:
        expected = oracle.logprobs(tuple(output.prompt_token_ids + completion.token_ids))[36:]
        for row, entry, token_id in zip(expected, completion.logprobs, completion.token_ids, strict=False):
            assert list(entry) == [token_id]
            oracle.check_entry(entry, row, 0)


def test_prompt_logprobs_cost_nothing_after_the_prompt(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = start(step_ahead=False), []
    launch = engine.replicas[0].executor.launch

    def spy(plan: StepPlan, program: StepShape) -> Any:
        asked.append(plan.wants_prompt_logprobs)
        return launch(plan, program)

    monkeypatch.setattr(engine.replicas[0].executor, "launch", spy)
    params = SamplingParams(n=2, seed=0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
    generate(engine, [tokens(30, "cost")], params)
    assert asked == 2 * [True] + 4 * [False]  # two chunks; the second sample begins beside the second chunk


def test_prompt_logprobs_survive_preemption(start: Start, oracle: transformers.PreTrainedModel) -> None:
    engine = start()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=2)
    outputs = generate(engine, [tokens(25, i) for i in range(4)], params)
    assert any(output.metrics.num_preemptions for output in outputs)
    for output in outputs:
        Oracle(oracle).check_prompt(output)

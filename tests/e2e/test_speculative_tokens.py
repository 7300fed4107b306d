"""Tokens of speculative decoding: those of plain decoding, or drawn from the same distribution."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tiny_tokenizers
import transformers
from hypothesis import given, settings
from scipy.special import softmax
from scipy.stats import chisquare
from test_oracle import Oracle

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import Vector
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.offline.llm import LLM
from jaxserve.scheduling.step_plan import StepPlan
from tests.e2e.proposers import GREEDY, TREE, few_in_ci, tokenizers_of
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, run, tokens
from tests.random_runs import examples
from tests.soon_compiled import few_programs

Start = Callable[..., DrivenEngine]


class TestAnyWorkload:
    """Batches, chunks, prefix hits, preemptions, mixed plans and all kinds of sampling at once."""

    @given(jobs=jobs(aborts=True))
    @settings(few_but_rich, max_examples=examples(4))
    def test_greedy_tokens_equal_plain_decoding(
        self, start: Start, speculation: SpeculationConfig, jobs: list[Job]
    ) -> None:
        jobs = [replace(job, params=replace(job.params, temperature=0)) for job in jobs]
        whole = [replace(job, abort=None) for job in jobs]
        expected = run(start(**tokenizers_of(speculation)), whole)
        engine = start(speculative_config=speculation, multi_step=8, **tokenizers_of(speculation))
        for output, wanted, job in zip(run(engine, whole), expected, jobs, strict=True):
            assert_same(output, wanted, job)
        for output, wanted in zip(run(engine, jobs), expected, strict=True):
            for cut, completion in zip(output.outputs, wanted.outputs, strict=True):
                assert cut.token_ids == completion.token_ids[: len(cut.token_ids)]


def tree_of(num_levels: int) -> list[tuple[int, ...]]:
    """Return the paths of a tree: most likely tokens, and branches off them at each level."""
    levels = range(num_levels)
    return [(0,) * (n + 1) for n in levels] + [(0,) * n + (1,) for n in levels] + [(1,) + (0,) * n for n in levels[1:]]


@pytest.fixture(scope="module")
def many_prompts() -> list[list[int]]:
    """Return 100 prompts, many of which begin or go on like others."""
    own = [tokens(1 + index % 13, f"many {index}") for index in range(100)]
    return [tokens(index % 4 * 6, "prefix") + prompt * (1 + index % 3) for index, prompt in enumerate(own)]


@pytest.mark.full
@pytest.mark.parametrize("proposer", few_in_ci("same", "tree", "heads", "layer"))
def test_greedy_tokens_of_a_hundred_prompts(
    start: Start,
    speculate: Callable[..., SpeculationConfig],
    monkeypatch: pytest.MonkeyPatch,
    many_prompts: list[list[int]],
    proposer: str,
) -> None:
    """Rounds of 1, 2, 4 and 8 tokens, or levels of a tree, by the same programs."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "num_pages": 100}
    options = {"speculative_token_tree": tree_of(8)} if proposer in ("tree", "medusa") else {}
    config = speculate(proposer, 8, **options)
    engine, params = start(speculative_config=config, **sizes, **tokenizers_of(config)), replace(GREEDY, max_tokens=12)
    expected = generate(start(**sizes), many_prompts, params)
    [replica] = engine.replicas
    for num_tokens in (1, 2, 4, 8):
        engine.reset_prefix_cache()
        before, chosen = replace(engine.stats), num_tokens
        monkeypatch.setattr(
            replica.chooser._pacer, "choose", lambda _, slots, _steps, k=chosen: (np.full(len(slots), k), 1)
        )
        for output, wanted in zip(generate(engine, many_prompts, params), expected, strict=True):
            assert_same(output, wanted)
        stats = engine.stats.since(before)
        assert stats.num_drafted_tokens > 100
        assert stats.num_accepted_tokens > 0 or proposer == "other"


@pytest.mark.parametrize("step_ahead", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2),
        replace(GREEDY, logit_bias={5: 3.0, 7: -100.0}),
        replace(GREEDY, logprobs=3),
        replace(GREEDY, ignore_eos=False, min_tokens=8, stop_token_ids=list(range(2, 40))),
    ],
    ids=["greedy", "penalties", "bias", "logprobs", "min_tokens"],
)
def test_every_parameter(
    start: Start, speculation: SpeculationConfig, params: SamplingParams, step_ahead: bool
) -> None:
    prompts = [tokens(n, f"drafts {n}") for n in (4, 9, 1)]
    expected = generate(start(), prompts, params)
    options = {"multi_step": 8} | tokenizers_of(speculation) | ({} if step_ahead else {"step_ahead": False})
    engine = start(speculative_config=speculation, **options)
    drafted = engine.stats.num_drafted_tokens
    for output, wanted in zip(generate(engine, prompts, params), expected, strict=True):
        assert_same(output, wanted)
    if speculation.method == "draft_model":
        assert engine.stats.num_drafted_tokens > drafted


@pytest.mark.parametrize("proposer", ["ngram", "tree", pytest.param("medusa", marks=pytest.mark.full)])
def test_tokens_that_were_not_drawn_leave_samples_as_they_are(
    start: Start, speculate: Callable[..., SpeculationConfig], proposer: str
) -> None:
    prompts, params = (
        [tokens(n, f"samples {n}") * 2 for n in range(1, 13)],
        replace(GREEDY, temperature=0.8, top_k=5, seed=3),
    )
    engine = start(speculative_config=speculate(proposer), multi_step=8)
    before = engine.stats.num_accepted_tokens
    for output, wanted in zip(generate(engine, prompts, params), generate(start(), prompts, params), strict=True):
        assert_same(output, wanted)
    assert engine.stats.num_accepted_tokens > before


def test_plain_steps_equal_those_of_an_engine_without_a_proposer(
    start: Start, speculate: Callable[..., SpeculationConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dispatches, their tokens and rounds, and the arrays that are uploaded, where no prefix is in the cache."""
    prompts, seen = [tokens(n, f"plain {n}") for n in (3, 9, 4, 7, 12)], []
    for options in ({}, {"speculative_config": speculate("same")}):
        with few_programs():  # as those with drafts have
            engine = start(multi_step=8, **options)
        uploads: list[Any] = []
        [replica] = engine.replicas
        pack = replica.executor.packer.pack

        def noted(plan: StepPlan, bucket: int, pack: Any = pack, uploads: Any = uploads) -> Any:
            upload = pack(plan, bucket)
            sizes = [len(blob) for blob in (upload.blob, *upload.admissions)]
            uploads.append((plan.shape, plan.num_steps, plan.counts, bucket, sizes, len(upload.slot_rows)))
            return upload

        with monkeypatch.context() as patch:
            patch.setattr(
                replica.chooser._pacer,
                "choose",
                lambda bucket, slots, max_steps: (np.zeros(len(slots), int), max_steps),
            )
            patch.setattr(replica.executor.packer, "pack", noted)
            generate(engine, prompts, replace(GREEDY, max_tokens=12))  # there are no preemptions
        seen.append(uploads)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 5


@pytest.mark.parametrize("tree", [None, pytest.param(TREE, marks=pytest.mark.full)], ids=["chain", "tree"])
@pytest.mark.long
def test_rows_beyond_the_draft_models_positions_continue_without_drafts(
    start: Start, speculate: Callable[..., SpeculationConfig], llama: Path, tmp_path: Path, tree: Any
) -> None:
    """The draft model is the model itself, with 20 positions."""
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    prompts = [tokens(n, f"positions {n}") for n in (3, 18, 30)]
    engine = start(speculative_config=speculate("same", model=str(tmp_path), speculative_token_tree=tree))
    before = replace(engine.stats)
    for output, wanted in zip(generate(engine, prompts, GREEDY), generate(start(), prompts, GREEDY), strict=True):
        assert_same(output, wanted)
    stats = engine.stats.since(before)
    assert 0 < stats.num_accepted_tokens < 20
    assert stats.num_drafted_tokens < 60, "there are none behind the 20th position"


@pytest.mark.full
def test_a_draft_of_another_family_with_another_tokenizer(start: Start, tmp_path: Path) -> None:
    """GPT-2 with tokens as Llama 2 has them: most of the model's tokens are missing in it."""
    backend = tiny_tokenizers.byte_fallback()
    checkpoints.write_checkpoint(tmp_path, "gpt2", vocab_size=backend.get_vocab_size())
    tiny_tokenizers.write(tmp_path, backend, bos_token="<s>", eos_token="</s>")
    prompts = [tokens(n, f"foreign {n}") for n in (3, 9, 14)]
    config = SpeculationConfig(model=str(tmp_path), num_speculative_tokens=3, adaptive=False)
    engine = start(speculative_config=config, skip_tokenizer_init=False, multi_step=8)
    for params in (GREEDY, replace(GREEDY, repetition_penalty=1.2, logprobs=1)):
        for output, wanted in zip(generate(engine, prompts, params), generate(start(), prompts, params), strict=True):
            assert_same(output, wanted)
    assert engine.stats.num_drafted_tokens > 0


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_tree_larger_than_the_rest_ends_like_plain_decoding(
    start: Start, speculate: Callable[..., SpeculationConfig], max_tokens: int
) -> None:
    params = replace(GREEDY, max_tokens=max_tokens)
    prompts = [tokens(n, "short") for n in (3, 4, 9)]
    engine = start(speculative_config=speculate("tree"), multi_step=8)
    for output, wanted in zip(generate(engine, prompts, params), generate(start(), prompts, params), strict=True):
        assert_same(output, wanted)
    engine.check_integrity()


def test_a_last_chunk_of_one_prompt_token_is_read(start: Start, speculation: SpeculationConfig) -> None:
    """It is computed in the first round with drafts, and was never sampled."""
    prompts = [tokens(n, f"chunks {n}") for n in (17, 33)]  # a step computes 16
    engine = start(speculative_config=speculation, multi_step=8, **tokenizers_of(speculation))
    for prompt in prompts:
        assert_same(*generate(engine, [prompt], GREEDY), *generate(start(), [prompt], GREEDY))


def test_plain_rows_beside_speculating_ones_are_bit_identical(
    start: Start, speculate: Callable[..., SpeculationConfig]
) -> None:
    """A row whose draft model has no position left goes on without drafts; so do sampled ones with logprobs."""
    params = replace(GREEDY, logprobs=2)
    prompts = [tokens(n, f"mixed {n}") for n in (3, 20, 33)]
    alone = [generate(start(), [prompt], params)[0] for prompt in prompts]
    together = generate(start(speculative_config=speculate("same"), multi_step=8), prompts, params)
    for output, wanted in zip(together, alone, strict=True):
        assert_same(output, wanted)


ONE_LAYER = {"mistral": {"num_hidden_layers": 1}}


@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma3", marks=pytest.mark.full)])
def test_models_with_windows_release_pages_and_draft(family: str, tmp_path: Path) -> None:
    """The draft model keeps to the pages of the widest window."""
    oracle = Oracle(checkpoints.write_checkpoint(tmp_path, family, **ONE_LAYER.get(family, {})))
    prompts = [tokens(n, f"windows {n}") for n in (3, 9, 30)]
    options: dict[str, Any] = SIZES | {
        "model": str(tmp_path),
        "skip_tokenizer_init": True,
        "num_pages": 60,
        "max_num_seqs": 1,
    }
    same = SpeculationConfig(model=str(tmp_path), num_speculative_tokens=3, adaptive=False)
    with few_programs():
        engine = DrivenEngine(EngineConfig(**options, speculative_config=same))
    for output in generate(engine, prompts, GREEDY):
        oracle.check_greedy(output, 24)
    engine.check_integrity()
    assert engine.stats.acceptance_rate > 0.95


def test_a_stop_string_inside_accepted_tokens_ends_the_text_there(
    llama: Path, llm: LLM, speculate: Callable[..., SpeculationConfig]
) -> None:
    plain = llm.generate(["drafted"], replace(GREEDY, max_tokens=20), use_tqdm=False)[0].outputs[0]
    stop = plain.text[len(plain.text) // 2 :][:2]
    params = replace(GREEDY, max_tokens=20, stop=[stop])
    expected = llm.generate(["drafted"], params, use_tqdm=False)[0].outputs[0]
    options = SIZES | {"multi_step": 8, "speculative_config": speculate("same")}
    with few_programs():
        speculative = LLM(str(llama), **options)
    with speculative:
        assert metrics_of(speculative)["vllm:spec_decode_num_drafts"] == 0
        output = speculative.generate(["drafted"], params, use_tqdm=False)[0].outputs[0]
        speculative.generate(["more"], GREEDY, use_tqdm=False)  # the last step is counted after its tokens are out
        metrics = metrics_of(speculative)
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    assert sum(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]) == accepted > 0
    assert metrics["vllm:spec_decode_num_draft_tokens"] >= accepted
    assert (output.text, output.token_ids, output.finish_reason) == (
        expected.text,
        expected.token_ids,
        expected.finish_reason,
    )
    assert output.finish_reason == "stop"


def metrics_of(llm: LLM) -> dict[str, Any]:
    """Return values by vLLM's names, read as vLLM's own example does."""
    return {m.name: m.values if isinstance(m, Vector) else m.value for m in llm.get_metrics()}


FILTERS = {"top_k": 6, "top_p": 0.8, "temperature": 2.0, "min_p": 0.05}


@pytest.mark.parametrize(
    ("proposer", "filters"),
    [
        *few_in_ci("same", "tree", "medusa", "foreign", values=(FILTERS,)),
        pytest.param("same", {"top_k": 4}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@pytest.mark.full
def test_the_first_three_tokens_have_the_target_s_distribution(
    start: Start,
    oracle: transformers.PreTrainedModel,
    speculate: Callable[..., SpeculationConfig],
    proposer: str,
    filters: dict[str, Any],
) -> None:
    """Chi-square over 20,000 draws, against probabilities by transformers; the prompt repeats itself for look-ups."""
    num_draws, block = 20_000, 500
    prompt = tokens(6, "chi") * 2
    params = SamplingParams(max_tokens=4, ignore_eos=True, n=block, **({"temperature": 1.0} | filters))
    tree = {"speculative_token_tree": [(0,), (1,), (0, 0), (1, 0)]}
    options: dict[str, Any] = tree if proposer in ("tree", "medusa") else {}
    config = speculate(proposer, 2, **options)
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_pages": 200}
    engine = start(speculative_config=config, **sizes, **tokenizers_of(config))
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(num_draws // block):
        [output] = generate(engine, [prompt], replace(params, seed=seed * block))  # seeds of samples count up from it
        for completion in output.outputs:
            key = tuple(completion.token_ids[:3])
            counts[key] = counts.get(key, 0) + 1
    expected = joint_distribution(oracle, prompt, params)
    assert counts.keys() <= expected.keys()
    pairs = np.array([(counts.get(key, 0), p * num_draws) for key, p in expected.items()])
    common = pairs[:, 1] >= 5
    observed, wanted = np.vstack([pairs[common], pairs[~common].sum(axis=0)]).T
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 0.01


def joint_distribution(
    oracle: transformers.PreTrainedModel, prompt: list[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Return the probability of each three tokens after a prompt."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for key, p in joint.items():
            logits = checkpoints.reference_logits(oracle, np.array([*prompt, *key]))[-1].astype(np.float64)
            probabilities = softmax(logits / params.temperature)
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
            top = np.argsort(-probabilities)[: params.top_k]
            mass = np.cumsum(probabilities[top]) / probabilities[top].sum()
            top = top[: np.searchsorted(mass, params.top_p) + 1]
            for token_id in top[probabilities[top] > 0]:
                share = probabilities[token_id] / probabilities[top].sum()
                longer[(*key, int(token_id))] = p * share
        joint = longer
    return joint

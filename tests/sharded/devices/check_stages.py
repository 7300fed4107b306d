"""Pipeline stages: the tokens and log probabilities of one stage, bit by bit, without a copy or a wait too many."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import draft_layers
import jax
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from safetensors.numpy import save_file

from jaxserve import LLM, LoRARequest, weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from jaxserve.models.adapted_specs import adapted_specs
from jaxserve.models.params import Params
from tests.checkpoints import STATE_TYPES, write_checkpoint
from tests.e2e.workloads import Job, assert_bitwise, assert_same, few_but_rich, generate, jobs, run, tokens
from tests.parameters import mainly
from tests.random_runs import examples
from tests.sharded.devices.sizes import MODEL, SIZES
from tests.tiny_tokenizers import byte_level, write

LAYERS = 5  # no number of stages divides them
# DeepSeek's first layers are dense; Gemma's windows alternate; the hybrid ones have few layers with attention.
OTHERS = ("gpt2", "gemma3", "olmoe", "deepseek_v3", "gpt_oss", "qwen3_next", "granite_moe_hybrid")
STATE_FAMILIES = OTHERS[-2:]
HYBRID = {"num_hidden_layers": LAYERS, "layer_types": [*STATE_TYPES * 2, STATE_TYPES[0]]}  # the last is recurrent
STAGE_SIZES = SIZES | {"multi_step": 1}

Start = Callable[..., DrivenEngine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of several layers."""
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama", **MODEL | {"num_hidden_layers": LAYERS})
    return path


@pytest.fixture(scope="module")
def start_stages(checkpoint: Path) -> Iterator[Start]:
    """Start an engine of the checkpoint, or reuse it."""
    engines: list[DrivenEngine] = []

    @cache
    def start(num_stages: int = 1, num_devices: int = 1, num_replicas: int = 1) -> DrivenEngine:
        sizes = {"tensor_parallel_size": num_devices, "data_parallel_size": num_replicas}
        config = EngineConfig(str(checkpoint), pipeline_parallel_size=num_stages, **STAGE_SIZES | sizes)
        engines.append(DrivenEngine(config))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def assert_all_bitwise(engine: DrivenEngine, oracle: DrivenEngine, workload: list[Job]) -> None:
    for each in (engine, oracle):
        each.reset_prefix_cache()
    for output, wanted in zip(run(engine, workload), run(oracle, workload), strict=True):
        assert_bitwise(output, wanted)


class TestAnyWorkload:
    """Batches, chunks, prefix hits, preemptions and all kinds of sampling at once."""

    @given(workload=jobs(aborts=False))
    @settings(few_but_rich, max_examples=examples(5))
    @pytest.mark.parametrize("sizes", mainly([(2, 1), (4, 2)], (2, 2), (4, 1), (5, 1)))
    def test_bits_are_those_of_one_stage(
        self, start_stages: Start, sizes: tuple[int, int], workload: list[Job]
    ) -> None:
        num_stages, num_devices = sizes
        assert_all_bitwise(start_stages(num_stages, num_devices), start_stages(1, num_devices), workload)

    @given(workload=jobs(aborts=True))
    @settings(few_but_rich, max_examples=examples(2))
    def test_aborted_requests_leave_nothing(self, start_stages: Start, workload: list[Job]) -> None:
        run(start_stages(2), workload)
        assert_all_bitwise(start_stages(2), start_stages(1), [Job(job.prompt, job.params) for job in workload])


@pytest.mark.parametrize("family", mainly(["deepseek_v3"], *OTHERS))
def test_other_families_have_the_bits_of_one_stage(tmp_path: Path, family: str) -> None:
    write_checkpoint(tmp_path, family, **HYBRID if family in STATE_FAMILIES else {})
    workload = [
        Job(tokens(length, length), SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=9, logprobs=2))
        for index, length in enumerate((3, 20, 11, 27, 9, 16))
    ]
    engines = [
        DrivenEngine(EngineConfig(str(tmp_path), pipeline_parallel_size=count, **STAGE_SIZES)) for count in (1, 2)
    ]
    assert_all_bitwise(*engines, workload)
    for engine in engines:
        engine.close()


POOLED = [
    ("MEAN", (3, 1)),
    *(pytest.param(*each, marks=pytest.mark.full) for each in (("LAST", (2, 2)), ("CLS", (4, 1)))),
]
EXTRAS = ("lora_bias", "use_dora")


@pytest.mark.parametrize("num_devices", mainly([1], 2))
def test_adapters_have_the_bits_of_one_stage(tmp_path: Path, num_devices: int) -> None:
    write_checkpoint(tmp_path, "llama", **MODEL | {"num_hidden_layers": LAYERS})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    prompts: list[Any] = [{"prompt_token_ids": tokens(count, count)} for count in (9, 5, 20, 11)]
    requests, outputs = [LoRARequest("a"), LoRARequest("b"), None, LoRARequest("a")], []
    for count in (1, 2):
        lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "lora_extras": EXTRAS}
        sizes = {"pipeline_parallel_size": count, "tensor_parallel_size": num_devices}
        llm = LLM.over(DrivenEngine(EngineConfig(str(tmp_path), **STAGE_SIZES | lora | sizes)))
        for seed, name in enumerate("ab"):
            llm.update_lora(name, factors(llm, seed), {"r": 4, "lora_alpha": 4, "use_dora": True})
        outputs.append(llm.generate(prompts, params, use_tqdm=False, lora_request=requests))
        llm.close()
    for wanted, output in zip(*outputs, strict=True):
        assert_bitwise(output, wanted)


def factors(llm: LLM, seed: int) -> dict[str, np.ndarray]:
    """Return random factors and magnitudes for all matrices in layers, by PEFT's names."""
    rng, arch, found = np.random.default_rng(seed), llm.engine.arch, {}
    for each in adapted_specs(arch, arch, EXTRAS):
        for part in each.parts:
            prefix, num_rows = f"base_model.model.{part.module}", each.num_rows(part)
            sizes = {"lora_A.weight": (4, each.spec.shape[1]), "lora_B.weight": (num_rows, 4)}
            for name, shape in (sizes | {"lora_magnitude_vector": (num_rows,)}).items():
                found[f"{prefix}.{name}"] = (0.2 * rng.normal(size=shape)).astype(np.float32)
    return found


def test_structured_outputs_have_the_bits_of_one_stage(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    write_checkpoint(tmp_path, "llama", **MODEL | {"num_hidden_layers": LAYERS, "vocab_size": 331})
    write(tmp_path, byte_level(320))
    form = {"regex": "[a-z]{8}[0-9]{20}"}
    workload = [
        Job(
            tokens(9, seed),
            SamplingParams(seed=seed, max_tokens=20, logprobs=2, structured_outputs=form if seed % 2 else None),
            arrival=seed,
        )
        for seed in range(5)
    ]
    engines = [
        DrivenEngine(
            EngineConfig(str(tmp_path), pipeline_parallel_size=count, **STAGE_SIZES | {"skip_tokenizer_init": False})
        )
        for count in (1, 3)
    ]
    assert_all_bitwise(*engines, workload)
    assert engines[1].stats.num_compiles == 0
    for engine in engines:
        engine.close()


def test_each_stage_holds_its_own_layers(start_stages: Start) -> None:
    stages = start_stages(4).replicas[0].executor.stages
    whole = start_stages(1).replicas[0].executor
    assert sum(len(stage.params["layers"]) for stage in stages) == LAYERS
    assert ["embed" in stage.params for stage in stages] == [True, False, False, False]
    assert ["lm_head" in stage.params for stage in stages] == [False, False, False, True]
    devices = [{device for leaf in jax.tree.leaves(stage.params) for device in leaf.devices()} for stage in stages]
    assert all(first.isdisjoint(second) for first, second in pairwise(devices))

    def pool_bytes(state: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(state.kv_pages))

    assert sum(pool_bytes(stage.state) for stage in stages) == pool_bytes(whole.state)


@pytest.mark.parametrize("num_stages", mainly([4], 2))
def test_steps_take_one_copy_per_stage_and_no_wait(
    start_stages: Start, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states pass to each stage but the first, sampled tokens to each but the last: S copies in all."""
    engine, calls = start_stages(num_stages), {"put": 0, "wait": 0, "launch": 0}
    executor = engine.replicas[0].executor

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    launch = executor.launch

    def launch_counting(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", counted("put", jax.device_put))
            patch.setattr(jax, "block_until_ready", counted("wait", jax.block_until_ready))
            calls["launch"] += 1
            return launch(*args)

    monkeypatch.setattr(executor, "launch", launch_counting)
    generate(engine, [tokens(20, n) for n in range(6)], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert calls["launch"] > 24
    assert calls["put"] <= num_stages * calls["launch"]
    assert not calls["wait"]
    assert engine.stats.num_compiles == 0


@pytest.fixture(scope="module")
def drafting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a method's options: the model drafts for itself; heads and layers repeat what the model says."""

    @cache
    def drafting(method: str) -> dict[str, Any]:
        options: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
        path = tmp_path_factory.mktemp(method)
        if method == "ngram":
            return options | {"prompt_lookup_min": 1}
        if method == "draft_model":
            path = checkpoint
        elif method == "medusa":
            size = weights.read_config(checkpoint)["hidden_size"]
            heads = {f"{n}.0.linear.weight": np.zeros((size, size), np.float32) for n in range(3)}
            save_file(heads, path / "a.safetensors")
        elif method == "eagle3":
            torch.manual_seed(0)  # some random heads draft nothing right
            draft_layers.write_eagle3(path, transformers.AutoModelForCausalLM.from_pretrained(checkpoint), (0, 3, 4))
        elif method == "mtp":
            draft_layers.write_mtp(path, transformers.AutoModelForCausalLM.from_pretrained(checkpoint))
        return options | {"model": str(path)}

    return drafting


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("draft_model", (2, 1)),
        ("eagle3", (4, 1)),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                *(("ngram", (3, 1)), ("draft_model", (4, 2)), ("mtp", (4, 1)), ("medusa", (4, 2))),
                *(("eagle3", (2, 2)), ("draft_model", (4, 1)), ("mtp", (2, 2))),
            )
        ),
    ],
)
def test_drafts_have_the_tokens_of_one_stage_without_drafts(
    checkpoint: Path,
    start_stages: Start,
    drafting: Callable[[str], dict[str, Any]],
    method: str,
    sizes: tuple[int, int],
) -> None:
    """Drafts are often right; rows are sampled or greedy, are preempted and find their pages again."""
    num_stages, num_devices = sizes
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    varied = (greedy, replace(greedy, logprobs=1), replace(greedy, temperature=0.3, seed=3), greedy)
    prompts = [[*tokens(3, number)] * 4 for number in range(4)]
    workload = [
        Job(prompt, each, arrival=index) for index, (prompt, each) in enumerate(zip(prompts, varied, strict=True))
    ]
    degrees = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_devices}
    config = EngineConfig(str(checkpoint), speculative_config=drafting(method), **STAGE_SIZES | degrees)
    with closing(DrivenEngine(config)) as engine:
        for output, wanted in zip(run(engine, workload), run(start_stages(1, num_devices), workload), strict=True):
            assert_same(output, wanted)
        assert engine.stats.num_accepted_tokens > (9 if method == "ngram" else 0)
        assert engine.stats.num_compiles == 0
        assert engine.stats.acceptance_rate > (0.5 if method == "draft_model" else 0), "the draft is the model"
        engine.check_integrity()


@pytest.mark.parametrize(("kind", "sizes"), POOLED)
def test_vectors_are_those_of_one_stage(checkpoint: Path, kind: str, sizes: tuple[int, int]) -> None:
    prompts, vectors = [tokens(count, count) for count in (50, 3, 33, 7, 20)], []
    for num_stages in (1, sizes[0]):
        degrees = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": sizes[1]}
        pooler = {"convert": "embed", "pooler_config": {"pooling_type": kind, "normalize": False}}
        llm = LLM(str(checkpoint), **STAGE_SIZES | degrees | pooler)
        outputs = llm.embed(prompts, use_tqdm=False)
        vectors.append(np.array([output.outputs.embedding for output in outputs]))
        llm.close()
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-6)  # sums over chunks, which differ with stages


@pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine
@pytest.mark.parametrize("family", mainly(["llama"], "gemma3", *STATE_FAMILIES))
@pytest.mark.parametrize("tier", mainly(["disk"], "host"))
def test_stages_load_and_swap_their_pages(checkpoint: Path, tmp_path: Path, family: str, tier: str) -> None:
    """Rows that do not fit are swapped out; later prompts find all earlier pages, on disk also in a new engine."""
    if family != "llama":
        checkpoint = tmp_path / "model"
        write_checkpoint(checkpoint, family, **HYBRID if family in STATE_FAMILIES else {})
    options = {"disk": {"kv_offloading_path": str(tmp_path / "pages")}, "host": {"kv_offloading_size": 0.01}}[tier]
    params = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts = [tokens(33, number) for number in range(5)]

    def outputs(num_stages: int, **options: Any) -> list[Any]:
        config = EngineConfig(str(checkpoint), pipeline_parallel_size=num_stages, **STAGE_SIZES | options)
        with closing(DrivenEngine(config)) as engine:
            found = [generate(engine, prompts, params) for _ in range(2)]
            if (mover := engine.replicas[0].mover) is not None:
                mover.sync()
                assert any(getattr(output.cached_tokens, tier) for output in found[1])
            assert engine.stats.num_compiles == 0
        return [*found[0], *found[1]]

    # Recurrent states depend on the chunks of a prompt, up to rounding, and these on what is cached.
    expected, compare = outputs(1), assert_same if family in STATE_FAMILIES else assert_bitwise
    for _ in range(1 + (tier == "disk")):
        for output, wanted in zip(outputs(2, **options), expected, strict=True):
            compare(output, wanted)


def test_replicas_have_stages_each(start_stages: Start) -> None:
    workload = [Job(tokens(9 + n, n), SamplingParams(temperature=0, max_tokens=6, logprobs=1)) for n in range(6)]
    assert_all_bitwise(start_stages(2, 1, 2), start_stages(1), workload)


def test_new_weights_reach_all_stages(tmp_path: Path) -> None:
    workload, engines = [Job(tokens(9, n), SamplingParams(temperature=0, max_tokens=6, logprobs=1)) for n in (1, 2)], []
    for seed, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, "llama", seed=seed, **MODEL | {"num_hidden_layers": LAYERS})
    for name, size in (("new", 1), ("old", 2)):
        engines.append(DrivenEngine(EngineConfig(str(tmp_path / name), pipeline_parallel_size=size, **STAGE_SIZES)))
    oracle, engine = engines
    before = run(engine, workload)
    engine.update_weights(str(tmp_path / "new"))
    assert_all_bitwise(engine, oracle, workload)
    assert [output.outputs[0].logprobs for output in before] != [o.outputs[0].logprobs for o in run(oracle, workload)]
    engine.sleep()
    engine.host.wake_up(None)
    assert_all_bitwise(engine, oracle, workload)


def test_a_failed_stage_loses_no_later_request(start_stages: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_stages(2)
    last = engine.replicas[0].executor.stages[-1]
    workload = [Job(tokens(9, 1), SamplingParams(temperature=0, max_tokens=6))]

    def fail(*_: Any) -> Params:
        raise RuntimeError("the stage fails")

    with monkeypatch.context() as patch:
        patch.setattr(last, "run", fail)
        engine.add_request("0", workload[0].prompt, workload[0].params)
        with pytest.raises(RuntimeError, match="the stage fails"):
            engine.step()
    assert_all_bitwise(engine, start_stages(1), workload)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 6}, "must be at most 5, the number of stages with attention into which the 5"),
        ({"pipeline_parallel_size": 5, "tensor_parallel_size": 2}, "got 2 x 5 x 1 and 8"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"speculative_token_tree": [(0,), (1,)]}},
            "speculative_token_tree must be None with a pipeline_parallel_size above 1",
        ),
        (
            {"pipeline_parallel_size": 2, "enable_lora": True, "lora_extras": ["embeddings"]},
            "lora_extras must not have 'embeddings'",
        ),
        ({"pipeline_parallel_size": 2, "multi_step": 4}, "multi_step must be 'auto' or 1"),
    ],
)
def test_what_stages_do_not_carry_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path, "llama", **MODEL | {"num_hidden_layers": LAYERS})
    with pytest.raises(ConfigError, match=message):
        DrivenEngine(EngineConfig(str(tmp_path), **STAGE_SIZES | options))

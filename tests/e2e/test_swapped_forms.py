"""Rows that are swapped out at any step continue as if undisturbed, whatever their layers keep for them.

Their outputs equal those alone bit by bit, log probabilities included, if both have the same programs: a preempted row
changes the number of tokens in other steps, and XLA adds in another order in a program of another size.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest

from jaxserve.api.cached_tokens import CachedTokens
from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.scheduling.step_plan import StepPlan
from tests.e2e.sizes import EOS, SIZES, VOCAB_SIZE
from tests.e2e.workloads import assert_bitwise, assert_same, generate, tokens
from tests.soon_compiled import few_programs

pytestmark = pytest.mark.usefixtures("any_load_pays")

Start = Callable[..., DrivenEngine]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
HOST = {"kv_offloading_size": 2.0**-10}
WHOLE = {"max_num_batched_tokens": 80}  # all prompts at once
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma4": {"vocab_size_per_layer_input": VOCAB_SIZE},
    "deepseek_v3": {},
    "glm_moe_dsa": {},
    "qwen3_5": HYBRID,
    "granite_moe_hybrid": HYBRID,
}
# They add a prompt's tokens in an order that depends on its parts, and a preempted row gets other parts.
PARTS_MATTER = {"glm_moe_dsa", "qwen3_5", "granite_moe_hybrid"}


def swap_often(engine: DrivenEngine, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[int]:
    """Preempt a row in ten random plans, in addition to those that lack pages; return the plans that are left."""
    scheduler, draw = engine.replicas[0].scheduler, random.Random(seed)
    (shard,) = scheduler.shards
    due, preempt = sorted(draw.sample(range(2, 35), 10)), shard.preempt_lower_classes
    num_plans = 0

    def preempt_any(plan: StepPlan) -> None:
        nonlocal num_plans
        preempt(plan)
        num_plans += 1
        rows = [*shard.ledger.running.values()]
        if rows and due and due[0] <= num_plans:
            del due[0]
            shard.ledger.preempt(draw.choice(rows), plan)

    monkeypatch.setattr(shard, "preempt_lower_classes", preempt_any)
    return due


def check(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    compare: Callable[[RequestOutput, RequestOutput], None] = assert_bitwise,
    **options: Any,
) -> None:
    with few_programs():
        engine = start(**options)
    prompts = [tokens(20, n) for n in range(4)]
    alone = [generate(engine, [prompt], GREEDY)[0] for prompt in prompts]
    engine.reset_prefix_cache()
    before = replace(engine.stats)
    with monkeypatch.context() as patched:
        left = swap_often(engine, patched, seed)
        outputs = generate(engine, prompts, GREEDY)
    for output, wanted in zip(outputs, alone, strict=True):
        compare(output, wanted)
    stats = engine.stats.since(before)
    assert not left
    assert stats.num_loaded_pages > 0
    assert stats.num_compiles == 0
    if not stats.num_drafted_tokens:
        assert stats.num_tokens == len(prompts) * (20 + 20 - 1), "a token is computed again"


@pytest.mark.parametrize("seed", range(3))
def test_swapped_rows_continue_as_if_undisturbed(start: Start, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    check(start, monkeypatch, seed, **HOST)


@pytest.mark.long
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "fp8"])
def test_quantised_pages(start: Start, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    check(start, monkeypatch, kv_cache_dtype=kv_cache_dtype, **HOST)


@pytest.mark.long
@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_any_type(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, on_disk: bool
) -> None:
    """Windows, heads of two sizes, latents, index keys, Gated DeltaNet and Mamba-2."""
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": EOS}
    checkpoints.write_checkpoint(tmp_path / "model", family, **sizes, **FAMILIES[family])
    tier: dict[str, Any] = {"kv_offloading_path": str(tmp_path / "pages")} if on_disk else HOST
    options: dict[str, Any] = {"model": str(tmp_path / "model")} | tier
    if family not in PARTS_MATTER:
        check(start, monkeypatch, **options)
    elif on_disk:  # also rows that are swapped out between two parts of their prompts
        check(start, monkeypatch, compare=assert_same, **options)
    else:
        check(start, monkeypatch, **options, **WHOLE)


@pytest.mark.long
@pytest.mark.parametrize("proposer", ["same", "layer", "mtp"])
def test_drafts(
    start: Start, monkeypatch: pytest.MonkeyPatch, speculate: Callable[..., SpeculationConfig], proposer: str
) -> None:
    """Drafts of another model, and of EAGLE-3 and MTP layers, whose entries move with the pages."""
    check(start, monkeypatch, compare=assert_same, speculative_config=speculate(proposer), multi_step=4, **HOST)


@pytest.mark.long
def test_states_survive_their_engine(tmp_path: Path) -> None:
    """Another engine continues from the snapshot at the last full page of each prompt."""
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": EOS}
    checkpoints.write_checkpoint(tmp_path / "model", "qwen3_5", **sizes, **FAMILIES["qwen3_5"])
    prompts, outputs = [tokens(22, n) for n in range(3)], []
    for _ in range(2):
        options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_offloading_path": str(tmp_path / "pages"), **SIZES}
        with few_programs():
            engine = DrivenEngine(EngineConfig(str(tmp_path / "model"), **options))
        outputs.append(generate(engine, prompts, GREEDY))
        engine.close()
    for before, after in zip(*outputs, strict=True):
        assert_same(after, before)
        assert (before.num_cached_tokens, after.cached_tokens) == (0, CachedTokens(disk=20))

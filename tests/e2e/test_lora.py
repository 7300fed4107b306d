"""LoRA adapters in the whole engine: against PEFT, alone as in any mix, reloaded, and without traces of others."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from scipy.special import log_softmax

from jaxserve import LLM, LoRARequest, RequestError, SamplingParams
from jaxserve.api.outputs import RequestOutput
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.program_store import compile_counter
from jaxserve.execution.runner import Runner
from jaxserve.pallas_kernels import native
from jaxserve.weights.adapter_files import read_adapter
from tests.adapters import adapted_logits, greedy_ids, write_adapters
from tests.e2e.workloads import TOLERANCE, tokens

pytest.importorskip("peft")

Start = Callable[..., DrivenEngine]

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "every": {"r": 4},
    "some": {"r": 8, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "patterns": {"r": 16, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"up_proj": 3}},
    "first_layer": {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [0]},
}
BASE = "__base__"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=4)
PROMPTS = [tokens(count, f"lora {count}") for count in (5, 9, 13, 6, 9)]
NAMES = [*CONFIGS, BASE]


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of adapters, and PEFT's model with all of them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="float32", attn_implementation="eager")
    directory = tmp_path_factory.mktemp("adapters")
    return directory, write_adapters(model, directory, CONFIGS)


@pytest.fixture
def requests(adapters: tuple[Path, Any]) -> list[LoRARequest | None]:
    directory, _ = adapters
    return [None if name == BASE else LoRARequest(name, 1, str(directory / name)) for name in NAMES]


def generate(llm: LLM, requests: list[LoRARequest | None], prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(given, GREEDY, use_tqdm=False, lora_request=requests)


def bits(output: RequestOutput) -> list[tuple[int, dict[int, float]]]:
    """Return all ids and log probabilities."""
    [completion] = output.outputs
    tables = [{key: entry.logprob for key, entry in table.items()} for table in completion.logprobs or ()]
    return list(zip(completion.token_ids, tables, strict=True))


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_a_mixed_batch_has_the_outputs_of_peft(start: Start, adapters, requests, backend):
    llm, (_, model) = LLM.over(start(**LORA, linear_backend=backend)), adapters
    expected = adapted_logits(model, PROMPTS, NAMES)
    for name, prompt, logits, output in zip(NAMES, PROMPTS, expected, generate(llm, requests), strict=True):
        (_, table), *_ = bits(output)
        wanted = log_softmax(logits[-1])
        assert max(abs(value - wanted[key]) for key, value in table.items()) < TOLERANCE, name
        assert output.outputs[0].token_ids == greedy_ids(model, prompt, name, 6), name


@pytest.mark.skipif(native.unavailable() is not None, reason="only native kernels sum in one order")
def test_every_adapter_alone_has_the_bits_of_the_mix(start: Start, requests):
    llm = LLM.over(start(**LORA))
    mixed = [bits(output) for output in generate(llm, requests)]
    for name, request, prompt, expected in zip(NAMES, requests, PROMPTS, mixed, strict=True):
        llm.reset_prefix_cache()
        [alone] = generate(llm, [request], [prompt])
        assert bits(alone) == expected, name


@pytest.mark.skipif(native.unavailable() is not None, reason="only native kernels sum in one order")
@pytest.mark.parametrize("options", [{"enable_lora": False}, {"multi_step": 5}], ids=["one step", "several steps"])
def test_base_rows_have_the_bits_of_an_engine_without_adapters(start: Start, requests, options):
    """Its programs have other sizes, too, if they compute several steps."""
    plain, llm = LLM.over(start(**options)), LLM.over(start(**LORA))
    *_, in_mix = generate(llm, requests)
    llm.reset_prefix_cache()
    alone = [generate(llm, [None], [prompt])[0] for prompt in PROMPTS]
    assert bits(alone[-1]) == bits(in_mix)
    expected = plain.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    assert [bits(output) for output in alone] == [bits(output) for output in expected]


@pytest.mark.skipif(native.unavailable() is not None, reason="only native kernels sum in one order")
@pytest.mark.parametrize("lengths", [(9, 7), (7, 9), (4, 12)])
def test_rows_without_tokens_are_no_adapters(start: Start, requests, lengths):
    """The last layers compute only the rows' last tokens; a step full of tokens has fewer rows than slots."""
    llm, prompts = LLM.over(start(**LORA)), [tokens(count, f"full {count}") for count in lengths]
    for pair in ([None, requests[0]], [requests[0], None]):
        llm.reset_prefix_cache()
        mixed = generate(llm, pair, prompts)
        for request, prompt, found in zip(pair, prompts, mixed, strict=True):
            llm.reset_prefix_cache()
            [alone] = generate(llm, [request], [prompt])
            assert bits(alone) == bits(found)


def test_cached_pages_belong_to_the_content_of_an_adapter(start: Start, adapters, requests):
    llm, (directory, _), prompt = LLM.over(start(**LORA)), adapters, tokens(13, "cached")

    def num_cached(request: LoRARequest | None) -> int:
        [output] = generate(llm, [request], [prompt])
        return output.num_cached_tokens

    assert [num_cached(request) for request in requests] == [0] * len(requests)
    assert [num_cached(request) for request in requests] == [12] * len(requests)
    assert num_cached(LoRARequest("same content", 1, str(directory / "every"))) == 12
    replaced = LoRARequest("every", 1, str(directory / "some"), load_inplace=True)
    assert num_cached(replaced) == 12, "it is now the content of another name"
    with pytest.raises(RequestError, match="choose another name, or pass load_inplace=True"):
        num_cached(requests[0])
    llm.load_lora(LoRARequest("every", 1, str(directory / "every"), load_inplace=True))


def test_a_reset_prefix_cache_leaves_adapters_in_their_slots(start: Start, requests, monkeypatch: pytest.MonkeyPatch):
    llm = LLM.over(start(**LORA))
    expected, loads = generate(llm, requests[:2], PROMPTS[:2]), []
    monkeypatch.setattr(Runner, "_load_adapter", lambda self, *load: loads.append(load))
    llm.reset_prefix_cache()
    again = generate(llm, requests[:2], PROMPTS[:2])
    assert not loads
    assert [output.num_cached_tokens for output in again] == [0, 0]
    assert list(map(bits, again)) == list(map(bits, expected))


def test_an_activated_adapter_shares_the_pages_before_its_invocation(start: Start, adapters, llama: Path):
    """aLoRA: tokens before the invocation are the base model's, and so are their pages."""
    llm, (directory, _) = LLM.over(start(**LORA)), adapters
    adapter = read_adapter(directory / "every")
    tensors = {
        f"base_model.model.{module}.lora_{name}.weight": factor
        for module, own in adapter.modules.items()
        for name, factor in (("A", own.a), ("B", own.b))
    }
    config = {"r": 4, "lora_alpha": 8, "alora_invocation_tokens": [7, 9]}
    llm.update_lora("late", tensors, config)
    prompt, late = [*tokens(8, "before"), 7, 9, *tokens(3, "after")], LoRARequest("late")
    [base] = generate(llm, [None], [prompt])
    [cached] = generate(llm, [late], [prompt])
    assert (base.num_cached_tokens, cached.num_cached_tokens) == (0, 8)
    llm.reset_prefix_cache()
    [computed], [again] = generate(llm, [late], [prompt]), generate(llm, [late], [prompt])
    assert bits(computed) == bits(cached) == bits(again) != bits(base)
    assert (computed.num_cached_tokens, again.num_cached_tokens) == (0, 12)
    [uninvoked], [plain] = (generate(llm, [request], [prompt[:8]]) for request in (late, None))
    assert bits(uninvoked) == bits(plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="float32", attn_implementation="eager")
    peft = write_adapters(model, directory / "late", {"late": {"r": 4, "alora_invocation_tokens": [7, 9]}})
    llm.load_lora(LoRARequest("late", 1, str(directory / "late" / "late"), load_inplace=True))
    (_, table), *_ = bits(generate(llm, [late], [prompt])[0])
    [logits] = adapted_logits(peft, [prompt], ["late"])
    wanted = log_softmax(logits[-1])
    assert max(abs(value - wanted[key]) for key, value in table.items()) < TOLERANCE
    llm.unload_lora("late")


def random_tensors(llm: LLM, rng: np.random.Generator, rank: int = 4) -> dict[str, np.ndarray]:
    arch = llm.engine.arch
    size, prefix = arch.hidden_size, "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    out = arch.attention.num_heads * arch.attention.head_dim
    shapes = {"A": (rank, size), "B": (out, rank)}
    return {f"{prefix}{name}.weight": rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}


def test_adapters_come_and_go_under_traffic(start: Start):
    """A hundred contents under a few names: nothing is compiled, and no request meets another's keys and values."""
    llm, rng, chooser = LLM.over(start(**LORA)), np.random.default_rng(0), random.Random(0)
    contents: dict[str, int] = {}
    seen: dict[int, list[Any]] = {}
    prompt, compiled = tokens(9, "traffic"), compile_counter.count
    for content in range(100):
        name = f"name {chooser.randrange(5)}"
        llm.update_lora(name, random_tensors(llm, rng), {"r": 4, "lora_alpha": 4})
        contents[name] = content
        if content % 7 == 6:
            llm.unload_lora(gone := chooser.choice(list(contents)))
            del contents[gone]
        asked = chooser.sample(sorted(contents), min(2, len(contents)))
        outputs = generate(llm, [LoRARequest(each) for each in asked], [prompt] * len(asked))
        for each, output in zip(asked, outputs, strict=True):
            found = bits(output)

            expected = seen.setdefault(contents[each], found)
            assert [token_id for token_id, _ in expected] == [token_id for token_id, _ in found]
            assert output.num_cached_tokens == (0 if expected is found else 8)
    first_tables = {tuple(sorted(found[0][1].items())) for found in seen.values()}
    assert len(first_tables) == len(seen), "every content has outputs of its own"
    assert compile_counter.count == compiled
    for name in llm.list_loras():
        llm.unload_lora(name)
    llm.engine.check_integrity()
    core, [replica] = llm.engine.core, llm.engine.replicas
    assert core.adapters_in_use() == (set(), set())
    assert replica.scheduler.num_pages_used == 0
    llm.reset_prefix_cache()
    generate(llm, [None], [prompt])
    replica.scheduler.adapters.forget_idle()
    assert len(replica.scheduler.adapters._free) == LORA["max_loras"], "all slots are back"


BAD: Mapping[str, tuple[dict[str, Any], str]] = {
    "another module": ({"rename": ("q_proj", "query")}, "must be in the model.*the most similar one is"),
    "another size": ({"resize": 3}, "the adapter must fit .* inputs and .* outputs, got factors for 3"),
    "large rank": ({"rank": 17}, "at most max_lora_rank, 16, got 17"),
    "norm": ({"rename": ("self_attn.q_proj", "input_layernorm")}, "are not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_adapters_of_other_models_are_refused_with_numbers(start: Start, name):
    llm, (change, message) = LLM.over(start(**LORA)), BAD[name]
    tensors = random_tensors(llm, np.random.default_rng(0), change.get("rank", 4))
    old, new = change.get("rename", ("", ""))
    tensors = {key.replace(old, new): array for key, array in tensors.items()}
    if "resize" in change:
        tensors = {key: array[:, : change["resize"]] if "lora_A" in key else array for key, array in tensors.items()}
    with pytest.raises(RequestError, match=message):
        llm.update_lora("bad", tensors, {})
    assert "bad" not in llm.list_loras()


def test_factors_that_overflow_are_refused(start: Start):
    """All rows meet all second factors in one matmul: an infinite one would spoil rows with other adapters."""
    llm = LLM.over(start(**LORA))
    tensors = random_tensors(llm, np.random.default_rng(0))
    with pytest.raises(RequestError, match="must be finite in float32, got larger ones in model"):
        llm.update_lora("large", tensors, {"r": 4, "lora_alpha": 1e39})


def test_an_engine_without_adapters_refuses_them(start: Start, requests):
    with pytest.raises(RequestError, match="enable_lora"):
        generate(LLM.over(start()), requests)


def test_an_adapter_that_has_no_effect_warns(start: Start, caplog: pytest.LogCaptureFixture):
    llm = LLM.over(start(**LORA))
    tensors = random_tensors(llm, np.random.default_rng(0))
    zero = {key: array * ("lora_A" in key) for key, array in tensors.items()}
    llm.update_lora("zero", zero, {})
    assert "the adapter has no effect" in caplog.text
    llm.unload_lora("zero")
    with pytest.raises(RequestError, match="there is no adapter 'zero'"):
        llm.unload_lora("zero")

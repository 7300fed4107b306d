"""Outputs of the embedded model follow their forms, as jsonschema and Python's `re` see it."""

import itertools
import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from safetensors.flax import load_file, save_file

from jaxserve import LLM, RequestError, SamplingParams, StructuredOutputsParams, weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.outputs import RequestOutput
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.event_log import replay_log
from tests.soon_compiled import few_programs
from tests.structured_output.forms import REGEXES, SCHEMAS, random_regex, random_schema

pytest.importorskip("llguidance")
PROMPTS = ["def f(x):", "import os\n", "The answer is"]
MODEL = Path(weights.__file__).parent / "default"
SIZES: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "page_size": 16,
    "num_pages": 40,
    "compile_ahead": "background",
    "multi_step": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the embedded model with 2 of its 4 layers: forms bind it whatever it makes of its prompts."""
    path = tmp_path_factory.mktemp("model")
    for file in MODEL.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, path)
    config = json.loads((MODEL / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tensors = load_file(MODEL / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not re.search(r"layers\.[23]\.", name)}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with few_programs():
        llm = LLM.over(DrivenEngine(EngineConfig(model, **SIZES)))
    llm.engine.wait_until_warm()  # programs of split plans come last
    yield llm
    assert llm.engine.stats.num_compiles == 0
    llm.engine.check_integrity()


def params(seed: int, max_tokens: int = 160, **form: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=form or None)


def generate(llm: LLM, each: list[SamplingParams]) -> list[RequestOutput]:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(each))]
    return llm.generate(prompts, each, use_tqdm=False)


def check(llm: LLM, output: RequestOutput, form: StructuredOutputsParams) -> bool:
    """Check an output against its form; returns whether it was complete."""
    completion = output.outputs[0]
    if completion.finish_reason == "stop":
        if form.regex is not None:
            assert re.fullmatch(form.regex, completion.text), (form.regex, completion.text)
        elif form.json is not None:
            value = json.loads(completion.text)
            jsonschema.validate(value, form.json, cls=jsonschema.Draft202012Validator)
        return True
    assert completion.finish_reason == "length"
    constraint = llm.engine.reader.grammars.constraint(SamplingParams(structured_outputs=form), frozenset({0}))
    assert constraint is not None
    constraint.advance(completion.token_ids)
    assert not constraint.error
    return False


def check_all(llm: LLM, forms: list[StructuredOutputsParams]) -> None:
    each = [SamplingParams(seed=index, max_tokens=100, structured_outputs=form) for index, form in enumerate(forms)]
    mixed = [p for index, p in enumerate(each) for p in (p, SamplingParams(seed=index, max_tokens=9))[: 1 + index % 2]]
    outputs = [o for o, p in zip(generate(llm, mixed), mixed, strict=True) if p.structured_outputs is not None]
    complete = [check(llm, output, form) for output, form in zip(outputs, forms, strict=True)]
    assert sum(complete) > 0.7 * len(forms)


def test_outputs_follow_schemas_and_regular_expressions(llm: LLM) -> None:
    # With white space most outputs are nothing else: it is what the model writes most.
    forms = [StructuredOutputsParams(json=s, disable_any_whitespace=i % 8 > 0) for i, s in enumerate(SCHEMAS)]
    forms += [StructuredOutputsParams(regex=regex) for regex in REGEXES]
    random.Random(0).shuffle(forms)
    check_all(llm, forms)


def test_white_space_does_not_fill_an_output(llm: LLM) -> None:
    """A model that prefers white space to all else still gets to the end."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    blank = [
        i for i in range(llm.engine.arch.vocab_size) if tokenizer.decode([i]) and not tokenizer.decode([i]).strip()
    ]
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    wanted = SamplingParams(
        max_tokens=200, logit_bias=dict.fromkeys(blank[:100], 50.0), structured_outputs={"json": schema}
    )
    completion = generate(llm, [wanted])[0].outputs[0]
    assert completion.finish_reason == "stop"
    assert isinstance(json.loads(completion.text)["on"], bool)
    assert max(map(len, re.findall(r"\s+", completion.text))) > 8, "white space is what it prefers"


@pytest.fixture(scope="module")
def busy() -> Iterator[LLM]:
    """Return an engine that preempts, drafts, and goes several steps at once."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(MODEL), **SIZES | {"num_pages": 34, "multi_step": 4}, speculative_config=speculation) as llm:
        llm.engine.wait_until_warm()
        yield llm
        llm.engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_outputs_follow_random_constraints(busy: LLM, seed: int) -> None:
    """200 schemas and 50 regular expressions in all, among rows that are free."""
    rng = random.Random(seed)
    forms = [
        StructuredOutputsParams(
            json=random_schema(rng), disable_any_whitespace=True, append_forced_tokens=rng.random() < 0.5
        )
        for _ in range(40)
    ]
    forms += [
        StructuredOutputsParams(regex=random_regex(rng), append_forced_tokens=rng.random() < 0.5) for _ in range(10)
    ]
    free = [SamplingParams(temperature=0, max_tokens=150, ignore_eos=True) for _ in range(16)]
    with_free = [SamplingParams(seed=i, max_tokens=100, structured_outputs=form) for i, form in enumerate(forms)] + free
    order = rng.sample(range(len(with_free)), len(with_free))
    found = generate(busy, [with_free[index] for index in order])
    outputs = dict(zip(order, found, strict=True))
    complete = [check(busy, outputs[index], form) for index, form in enumerate(forms)]
    assert sum(complete) > 0.7 * len(forms)
    metrics = [outputs[index].outputs[0].metrics for index in order]
    assert sum(each.num_preemptions for each in metrics) > 0
    assert sum(outputs[len(forms) + i].outputs[0].metrics.num_drafted_tokens for i in range(len(free))) > 0


def test_forced_tokens_take_no_steps(llm: LLM) -> None:
    names = [f"a_property_with_a_long_name_{number}" for number in range(4)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    steps, texts = [], []
    for forced in (False, True):
        form = StructuredOutputsParams(json=schema, disable_any_whitespace=True, append_forced_tokens=forced)
        own = [SamplingParams(seed=seed, max_tokens=150, structured_outputs=form) for seed in range(6)]
        before = llm.engine.stats.num_steps
        outputs = [output.outputs[0] for output in generate(llm, own)]
        steps.append(llm.engine.stats.num_steps - before)
        assert all(list(json.loads(output.text)) == names for output in outputs)
        assert all(llm.engine.tokenizer.decode(output.token_ids) == output.text for output in outputs)  # type: ignore[union-attr]
        texts.append({output.text for output in outputs})
    assert steps[1] < steps[0] / 3, steps
    assert min(map(len, texts)) > 1, "what is free is sampled"
    cut = SamplingParams(max_tokens=5, structured_outputs={"regex": "a{40}", "append_forced_tokens": True})
    (output,) = generate(llm, [cut])
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 5)
    for other in ({"logprobs": 1}, {"presence_penalty": 1.0}, {"bad_words": ["x"]}):
        with pytest.raises(RequestError, match="append_forced_tokens cannot be combined"):
            generate(llm, [SamplingParams(structured_outputs={"regex": "a", "append_forced_tokens": True}, **other)])


def test_choice_object_and_grammar(llm: LLM) -> None:
    choice = ["yes", "n.o", "a|b", "ü (x)"]
    grammar = 'start: "a" item+ "z"\nitem: /[0-9]/ | "(" item ")"'
    each = [params(seed, choice=choice) for seed in range(8)]
    each += [params(seed, 40, json_object=True, disable_any_whitespace=True) for seed in range(4)]
    each += [params(seed, 40, grammar=grammar) for seed in range(4)]
    texts = [(o.outputs[0].text, o.outputs[0].finish_reason) for o in generate(llm, each)]
    assert all(text in choice and reason == "stop" for text, reason in texts[:8])
    assert len({text for text, _ in texts[:8]}) > 1
    assert all(isinstance(json.loads(text), dict) for text, reason in texts[8:12] if reason == "stop")
    assert all(text.startswith("{") for text, _ in texts[8:12])
    assert all(re.fullmatch(r"a[0-9()]+z", text) for text, reason in texts[12:] if reason == "stop")


def test_samples_of_one_request_have_separate_constraints(llm: LLM) -> None:
    own = SamplingParams(n=4, seed=0, max_tokens=40, logprobs=2, structured_outputs={"regex": REGEXES[0]})
    (output,) = llm.generate(PROMPTS[0], own, use_tqdm=False)
    assert all(re.fullmatch(REGEXES[0], sample.text) for sample in output.outputs)
    assert all(len(sample.logprobs or ()) == len(sample.token_ids) for sample in output.outputs)
    assert len({sample.text for sample in output.outputs}) > 1


def test_unconstrained_rows_keep_their_tokens(llm: LLM) -> None:
    # All prompts in one step, then as many rows to the end: programs for other numbers may differ in their last bits.
    plain = [SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, logprobs=1) for seed in range(8)]
    alone = generate(llm, plain)
    among = generate(llm, plain[:5] + [params(seed, 40, regex=r"[a-z ]{400}") for seed in range(3)])
    for one, other in zip(alone[:5], among, strict=False):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob
    assert all(len(output.outputs[0].token_ids) == 40 for output in among)


def test_constrained_output_depends_only_on_its_seed(llm: LLM) -> None:
    each = [params(seed, json=SCHEMAS[3], disable_any_whitespace=True) for seed in range(4)]
    together = [output.outputs[0].token_ids for output in generate(llm, each)]
    for index, own in enumerate(each):
        (output,) = llm.generate(PROMPTS[index % 3], own, use_tqdm=False)
        assert output.outputs[0].token_ids == together[index]


def test_preempted_constrained_requests_continue(llm: LLM) -> None:
    forms = [StructuredOutputsParams(regex=r"[a-z]{60,100}!") for _ in range(16)]
    outputs = generate(llm, [params(index, regex=form.regex) for index, form in enumerate(forms)])
    assert sum(output.outputs[0].metrics.num_preemptions for output in outputs) > 0
    for output, form in zip(outputs, forms, strict=True):
        check(llm, output, form)


def test_refused_constraints_do_not_affect_other_requests(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not"):
        llm.generate(PROMPTS[0], params(0, json={"not": {"type": "string"}}), use_tqdm=False)
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate(PROMPTS[0], params(0, regex="((("), use_tqdm=False)
    own = SamplingParams(allowed_token_ids=[5], structured_outputs={"choice": ["q"]})
    with pytest.raises(RequestError, match="allow a first token"):
        llm.generate(PROMPTS[0], own, use_tqdm=False)
    (output,) = llm.generate(PROMPTS[0], params(0, choice=["a"]), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")


def test_combined_with_other_parameters(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    digits = [llm.engine.tokenizer.encode(d, add_special_tokens=False)[0] for d in "01"]  # type: ignore[union-attr]
    form = {"regex": "[0-9]{6}"}
    own = [
        SamplingParams(seed=1, allowed_token_ids=[0, *digits], structured_outputs=form),
        SamplingParams(seed=2, min_tokens=20, max_tokens=30, structured_outputs=form),
        SamplingParams(seed=3, ignore_eos=True, max_tokens=30, structured_outputs=form),
        SamplingParams(seed=4, stop="7", max_tokens=30, structured_outputs={"regex": "[1-6]{2}7[0-9]{6}"}),
    ]
    allowed, at_least, no_eos, stopped = (output.outputs[0] for output in generate(llm, own))
    assert re.fullmatch("[01]{6}", allowed.text)
    assert all(re.fullmatch("[0-9]{6}", c.text) and c.finish_reason == "stop" for c in (allowed, at_least, no_eos))
    assert (len(stopped.text), stopped.stop_reason) == (2, "7")
    with caplog.at_level(logging.WARNING):
        own = [SamplingParams(allowed_token_ids=digits, structured_outputs={"regex": "[01]{2}q"})]
        (output,) = generate(llm, own)
    assert output.outputs[0].finish_reason == "abort"
    assert "allow no token" in caplog.text


def test_model_runs_before_its_masks_are_ready(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes the next token of all rows while the host reads the last one and makes its masks."""
    replica = llm.engine.core.replicas[0]
    executor = replica.executor
    events: list[tuple[str, int]] = []

    def recorded(owner: Any, name: str, step_of: Callable[..., int]) -> None:
        method = getattr(owner, name)

        def record(*args: Any) -> Any:
            events.append((name, step_of(*args)))
            return method(*args)

        monkeypatch.setattr(owner, name, record)

    recorded(executor, "launch", lambda plan, bucket: plan.step_id)
    recorded(llm.engine.core, "_read", lambda replica: replica.in_flight[0].plan.step_id)
    recorded(executor.packer, "masks", lambda plan: plan.step_id)  # type: ignore[attr-defined]
    form = {"regex": "[a-z]{40}"}
    generate(llm, [SamplingParams(seed=seed, max_tokens=20, structured_outputs=form) for seed in range(16)])
    place = {event: index for index, event in enumerate(events)}
    last = max(step for _, step in events)
    in_order = [
        place["launch", step + 1] < place["_read", step] < place["masks", step + 1]
        for step in range(min(step for _, step in events), last)
    ]
    assert sum(in_order) > 15, events


def test_constrained_rows_batch_together_and_alternate_with_others(llm: LLM) -> None:
    """Constrained rows share a step, or every second one beside other rows, where no program splits plans."""
    plans: list[list[bool]] = []
    replica = llm.engine.core.replicas[0]
    schedule, executor = replica.scheduler.schedule, replica.executor
    fit = executor.fit
    executor.fit = lambda step: None if step.samples_late else fit(step)  # type: ignore[method-assign]

    def recorded(*args: Any, **kwargs: Any) -> Any:
        plan = schedule(*args, **kwargs)
        if plan is not None and not plan.num_prefill_tokens:
            plans.append([request.constraint is not None for request in plan.requests])
        return plan

    replica.scheduler.schedule = recorded  # type: ignore[method-assign]
    try:
        own = [SamplingParams(seed=s, max_tokens=20, structured_outputs={"regex": "[a-z]{40}"}) for s in range(4)]
        generate(llm, own)
        alone, plans[:] = list(plans), []
        generate(llm, [*own[:2], SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)])
    finally:
        del replica.scheduler.schedule
        del executor.fit
    sizes = [len(plan) for plan in alone]  # they come and go one by one
    most = sizes.index(max(sizes))
    assert sizes == sorted(sizes[:most]) + sorted(sizes[most:], reverse=True), sizes
    assert sizes.count(4) > 8, sizes
    constrained = [sum(plan) for plan in plans]
    assert all(False in plan for plan in plans)
    assert set(constrained) <= {0, 1, 2}
    assert not any(a and b and a + b > 2 for a, b in itertools.pairwise(constrained)), constrained


@pytest.mark.full
@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_constrained_rows_have_no_drafts(method: str) -> None:
    """Beside others and, in split plans, alone: there the heads of EAGLE-3 read the hidden states all the same."""
    speculation = {"method": method, "num_speculative_tokens": 3}
    llm = LLM(**SIZES, speculative_config=speculation)
    llm.engine.wait_until_warm()
    form = StructuredOutputsParams(regex=r"(ab){30}")
    each = [SamplingParams(seed=s, max_tokens=80, temperature=0.0) for s in range(3)]
    each += [SamplingParams(seed=s, max_tokens=80, structured_outputs=form) for s in range(3)]
    outputs = generate(llm, each)
    assert sum(output.outputs[0].metrics.num_drafted_tokens for output in outputs[:3]) > 0
    for output in outputs[3:]:
        assert output.outputs[0].metrics.num_drafted_tokens == 0
        assert check(llm, output, form)
    alone = generate(llm, each[3:])
    assert [output.outputs[0].token_ids for output in alone] == [output.outputs[0].token_ids for output in outputs[3:]]


def test_restarted_requests_restart_their_constraints(llm: LLM) -> None:
    own = params(3, regex="[a-z]{40}[0-9]{4}")
    engine, before = llm.engine, llm.engine.stats.num_output_tokens
    with llm._threads.paused():
        engine.add_request("again", PROMPTS[0], own)
        while engine.stats.num_output_tokens < before + 8:
            engine.step()
        engine.update_weights(llm.params, running="restart")
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
    assert outputs[-1].metrics.num_restarts == 1
    assert re.fullmatch("[a-z]{40}[0-9]{4}", outputs[-1].outputs[0].text)


def test_recorded_constrained_run_replays(model: str, tmp_path: Path) -> None:
    log = tmp_path / "events"
    with few_programs():
        llm = LLM(model, **SIZES | {"multi_step": 8}, event_log=str(log))
    with llm:
        forms = [{"regex": "[a-z]{5}[0-9]{20}"}, {"regex": "[a-z]then this text[0-9]", "append_forced_tokens": True}]
        generate(llm, [params(seed, **form) for seed in range(3) for form in forms] + [params(9), params(10)])
    assert replay_log(log) > 10

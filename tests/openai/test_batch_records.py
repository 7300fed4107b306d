"""Records of a batch: requests and responses."""

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import BusyError
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import CHAT, COMPLETIONS, check_model, parse_body
from tests.openai.batches import chat, completion, run

# Requests and responses


def test_any_model_name_unless_some_are_given(engine: FakeEngine, tmp_path: Path) -> None:
    requests = [completion("a", model="other"), completion("b", model="mine")]
    records = run(engine, tmp_path, requests)
    assert [records[f"batch_req_{i}"]["response"]["body"]["model"] for i in (1, 2)] == ["other", "mine"]
    (tmp_path / "out.jsonl").unlink()
    records = run(engine, tmp_path, requests, model_names=["mine"])
    assert records["batch_req_1"]["error"]["code"] == "model_not_found"
    assert "model must be one of ['mine']" in records["batch_req_1"]["error"]["message"]
    assert records["batch_req_2"]["response"]["status_code"] == 200


def test_an_unknown_model_is_told_a_few_adapters() -> None:
    with pytest.raises(BadRequestError, match=r"one of \['mine', 'a0', .*'a7'\] or 92 more adapters, got 'other'"):
        check_model("other", ["mine"], [f"a{index}" for index in range(100)])


def test_a_line_waits_for_what_earlier_lines_use(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it is refused."""
    add, busy = engine.add_request, iter([False, True, True])

    def add_later(*args: Any, **options: Any) -> Any:
        if next(busy, len(engine.waiting) > 0):
            raise BusyError("try again")
        return add(*args, **options)

    monkeypatch.setattr(engine, "add_request", add_later)
    records = run(engine, tmp_path, [completion("a"), completion("b"), completion("c")])
    assert [records[f"batch_req_{i}"]["response"]["status_code"] for i in (1, 2, 3)] == [200] * 3
    monkeypatch.setattr(engine, "add_request", always_busy)
    (tmp_path / "out.jsonl").unlink()
    record = run(engine, tmp_path, [completion("a")])["batch_req_1"]
    assert (record["response"]["status_code"], record["error"]["code"]) == (503, "overloaded")


def test_a_run_that_ends_while_a_line_waits_leaves_the_line_for_the_next_run(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, ends = engine.add_request, KeyError("the server stops")

    def stop() -> Any:
        raise ends

    with monkeypatch.context() as patch:
        patch.setattr(engine, "wait", stop)
        patch.setattr(
            engine, "add_request", lambda name, *args, **kw: (always_busy if "2" in name else add)(name, *args, **kw)
        )
        with pytest.raises(KeyError, match="the server stops"):
            run(engine, tmp_path, [completion("a"), completion("b")])
    records = run(engine, tmp_path, [completion("a"), completion("b")])
    assert [records[f"batch_req_{i}"]["response"]["status_code"] for i in (1, 2)] == [200] * 2


def always_busy(*_: Any, **__: Any) -> None:
    raise BusyError("try again")


def test_completion_record(engine: FakeEngine, tmp_path: Path) -> None:
    record = run(engine, tmp_path, [completion("a", logprobs=2, user="me", suffix=None)])["batch_req_1"]
    assert record["custom_id"] == "a"
    assert record["error"] is None
    response = record["response"]
    assert response["status_code"] == 200
    body = response["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"] == f"cmpl-{response['request_id']}"
    num_prompt = len(engine.tokenizer.encode("Once upon a time"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert [len(logprobs[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [5, 5, 5, 5]
    lengths = [len(t) for t in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(5)]


def test_all_log_probabilities(engine: FakeEngine, tmp_path: Path) -> None:
    lines = [chat("a", logprobs=True, top_logprobs=-1, max_tokens=1), completion("b", logprobs=-1, max_tokens=1)]
    records = run(engine, tmp_path, lines)
    (chosen,), (completed,) = (records[f"batch_req_{i}"]["response"]["body"]["choices"] for i in (1, 2))
    assert len(chosen["logprobs"]["content"][0]["top_logprobs"]) == engine.tokenizer.vocab_size
    assert len(completed["logprobs"]["top_logprobs"][0]) > engine.tokenizer.vocab_size / 2  # some tokens share a text


def test_forbidden_tokens_reach_the_engine(engine: FakeEngine) -> None:
    fields = {"allowed_token_ids": [5, 6], "bad_words": ["bad", "worse"]}
    for line in (completion("a", **fields), chat("a", **fields)):
        parsed = parse_body(line["url"], line["body"], BodyContext("m", [], engine.tokenizer, SamplingParams()))
        assert (parsed.params.allowed_token_ids, parsed.params.bad_words) == ([5, 6], ["bad", "worse"])


def test_chat_record(engine: FakeEngine, tmp_path: Path) -> None:
    record = run(engine, tmp_path, [chat("a", logprobs=True, top_logprobs=3, max_tokens=None)])["batch_req_1"]
    body = record["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == len(engine.tokenizer.encode("[user] Hi\n[assistant] "))
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == body["usage"]["completion_tokens"] == 40  # the engine's limit
    for token in choice["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == 3
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("text", 1), (["one", "two"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
def test_every_kind_of_prompt(engine: FakeEngine, tmp_path: Path, prompt: object, num_prompts: int) -> None:
    record = run(engine, tmp_path, [completion("a", prompt, n=3)])["batch_req_1"]
    choices = record["response"]["body"]["choices"]
    assert [c["index"] for c in choices] == list(range(3 * num_prompts))
    assert len({c["text"] for c in choices}) == 3 * num_prompts


def test_seed_of_the_request_counts(engine: FakeEngine, tmp_path: Path) -> None:
    records = run(engine, tmp_path, [completion("a", seed=1), completion("b", seed=1), completion("c")])
    texts = [r["response"]["body"]["choices"][0]["text"] for r in records.values()]
    assert texts[0] == texts[1] != texts[2]


def test_null_fields_are_not_given(engine: FakeEngine, tmp_path: Path) -> None:
    record = run(engine, tmp_path, [chat("a", temperature=None, stop=None, tools=None, stream=False)])["batch_req_1"]
    assert record["error"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "safety_identifier": "x", "metadata": {"any": ["thing"]}},
        {"store": False, "service_tier": "auto", "stream": False, "stream_options": None},
        {"service_tier": "default"},
    ],
)
@pytest.mark.parametrize("kind", [completion, chat])
def test_labels_and_features_switched_off_change_nothing(engine: FakeEngine, kind: object, fields: dict) -> None:
    plain, labelled = kind("a"), kind("b", **fields)
    check_same([plain["body"], labelled["body"]], engine, plain["url"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "tools": [], "parallel_tool_calls": False},
        {"parallel_tool_calls": True, "logprobs": False, "top_logprobs": 0},
        {"max_completion_tokens": 5},
    ],
)
def test_chat_features_switched_off(engine: FakeEngine, fields: dict) -> None:
    check_same([chat("a")["body"], chat("b", **fields)["body"]], engine, CHAT)


@pytest.mark.parametrize("fields", [{"echo": False, "suffix": "", "best_of": 1}, {"best_of": 2}, {"suffix": None}])
def test_completion_features_switched_off(engine: FakeEngine, fields: dict) -> None:
    check_same([completion("a", n=2)["body"], completion("b", n=2, **fields)["body"]], engine, COMPLETIONS)


def check_same(bodies: list[dict], engine: FakeEngine, url: str) -> None:
    first, second = (
        parse_body(url, body, BodyContext("tiny", (), engine.tokenizer, SamplingParams())) for body in bodies
    )
    assert first == second


def test_absent_sampling_fields_are_the_checkpoints(engine: FakeEngine) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    defaults = SamplingParams(**recommended, max_tokens=999)

    def params(url: str, **body: object) -> SamplingParams:
        return parse_body(url, body, BodyContext("tiny", (), engine.tokenizer, defaults)).params

    given = {"temperature": 0, "top_k": 3}
    messages = [{"role": "user", "content": "Hi"}]
    expected = SamplingParams(**recommended | given, max_tokens=16)
    assert params(COMPLETIONS, prompt="x", top_p=None, **given) == expected
    assert params(CHAT, messages=messages, **given) == SamplingParams(**recommended | given, max_tokens=None)
    assert defaults == SamplingParams(**recommended, max_tokens=999)


def test_a_batch_samples_as_the_checkpoint_recommends(engine: FakeEngine, tmp_path: Path) -> None:
    engine.default_sampling_params = SamplingParams(temperature=0.25)
    added, add_request = [], engine.add_request

    def adding(request_id: str, prompt: object, params: SamplingParams, **options: object) -> None:
        added.append(params.temperature)
        add_request(request_id, prompt, params, **options)

    engine.add_request = adding
    run(engine, tmp_path, [completion("a"), chat("b"), chat("c", temperature=0.5)])
    assert added == [0.25, 0.25, 0.5]

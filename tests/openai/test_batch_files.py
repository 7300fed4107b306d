import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import fake_engine
import pytest
import tiny_tokenizers
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killing import records_by_id, run_with_kills

from jaxserve.errors import ConfigError, PeerLostError
from jaxserve.openai import batch_files, batch_output
from jaxserve.openai import format as openai_format
from jaxserve.openai.batch_files import find_finished, run_batch
from jaxserve.openai.format import CHAT, COMPLETIONS, parse_body
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.random_runs import examples

CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    return tiny_tokenizers.write(directory, tiny_tokenizers.byte_level(), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


def completion(custom_id: str, prompt: object = "Once upon a time", **body: object) -> dict:
    body = {"prompt": prompt, "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: str, **body: object) -> dict:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def mixed_requests(count: int) -> list[dict]:
    rng = random.Random(0)
    requests = []
    for i in range(count):
        kind = [completion, chat][rng.randrange(2)]
        requests.append(kind(f"id-{i}", max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2])))
        if rng.random() < 0.1:
            requests[-1]["body"]["bad"] = 1
    return requests


def write_lines(path: Path, requests: list) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in requests))
    return path


def run(engine: FakeEngine, folder: Path, requests: list, **options: object) -> dict[str, dict]:
    write_lines(folder / "in.jsonl", requests)
    run_batch(engine, folder / "in.jsonl", folder / "out.jsonl", use_tqdm=False, **options)
    assert not engine.has_unfinished()
    return records_by_id(folder / "out.jsonl")


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
        parsed = parse_body(line["url"], line["body"], "m", [], engine.tokenizer, SamplingParams())
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
        {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y", "metadata": {"any": ["thing"]}},
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
    first, second = (parse_body(url, body, "tiny", (), engine.tokenizer, SamplingParams()) for body in bodies)
    assert first == second


def test_absent_sampling_fields_are_the_checkpoints(engine: FakeEngine) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    defaults = SamplingParams(**recommended, max_tokens=999)

    def params(url: str, **body: object) -> SamplingParams:
        return parse_body(url, body, "tiny", (), engine.tokenizer, defaults).params

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


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b"{", "invalid_json_line", "JSON object"),
        (b"[1]", "invalid_json_line", "JSON object"),
        (b"\xff\xfe{}", "invalid_json_line", "JSON object"),
        (b'{"custom_id": NaN}', "invalid_json_line", "NaN is not JSON"),
        (b"[" * 100_000, "invalid_json_line", "JSON object"),
        (b'{"custom_id": "a", "body": {"max_tokens": ' + b"9" * 5000 + b"}}", "invalid_json_line", "JSON object"),
        ({"method": "POST"}, "invalid_request", "custom_id must be a non-empty string, got None"),
        (completion("a") | {"custom_id": [17]}, "invalid_request", "custom_id must be a non-empty string, got [17]"),
        (completion("a") | {"method": "GET"}, "invalid_request", "method must be"),
        (completion("a") | {"url": "/v1/images"}, "invalid_url", "url must be"),
        (completion("a") | {"url": ["/v1/completions"]}, "invalid_url", "url must be"),
        (completion("a") | {"extra": 1}, "unsupported_parameter", r"['extra'] in the line"),
        (completion("a") | {"body": "x"}, "invalid_request", "body must be an object"),
        (completion("a", tools=[], guided="x"), "unsupported_parameter", "['guided', 'tools'] in the body"),
        (completion("a", messages=[]), "unsupported_parameter", "['messages'] in the body"),
        (chat("a", prompt="x"), "unsupported_parameter", "['prompt'] in the body"),
        (completion("a", stream=True), "unsupported_value", "stream is not supported: it must be false, got True"),
        (completion("a", echo=1), "invalid_request", "echo must be a bool"),
        (completion("a", store=0), "unsupported_value", "store is not supported: it must be false, got 0"),
        (completion("a", suffix="x"), "unsupported_value", "suffix is not"),
        (completion("a", best_of=3, n=2), "unsupported_value", "best_of is not supported: it must be 1 or n"),
        (completion("a", stream_options={}), "invalid_request", "stream_options need stream: true"),
        (chat("a", response_format={"type": "xml"}), "invalid_request", "must have the type text, json_object or"),
        (chat("a", response_format={"type": "json_schema"}), "invalid_request", "must have a schema in json_schema"),
        (chat("a", tools=[{"type": "function"}]), "invalid_request", "tools must be of the form"),
        (chat("a", service_tier="flex"), "unsupported_value", """must be "auto" or "default", got 'flex'"""),
        (chat("a", user=5), "invalid_request", "user must be a str"),
        (chat("a", metadata="x"), "invalid_request", "metadata must be a dict"),
        (completion("a", model=["tiny"]), "invalid_request", "model must be"),
        (completion("a", prompt=None), "invalid_request", "prompt must be"),
        (completion("a", prompt=[]), "invalid_request", "prompt must be"),
        (completion("a", prompt=[1, "x"]), "invalid_request", "prompt must be"),
        (completion("a", prompt=[[]]), "invalid_request", "prompt must be"),
        (completion("a", prompt="\ud800"), "invalid_request", "valid Unicode"),
        (completion("a", prompt=["fine", "refuse"]), "invalid_request", "must not say refuse"),
        (completion("a", temperature="hot"), "invalid_request", "temperature must be"),
        (completion("a", temperature=10**400), "invalid_request", "temperature must be"),
        (completion("a", max_tokens=0), "invalid_request", "max_tokens must be"),
        (completion("a", logprobs=True), "invalid_request", "logprobs must be"),
        (completion("a", cache_salt=5), "invalid_request", "cache_salt must be"),
        (chat("a", messages="Hi"), "invalid_request", "messages must be"),
        (chat("a", messages=[{"content": "Hi"}]), "invalid_request", "with a role"),
        (chat("a", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "invalid_request", "parts must"),
        (chat("a", messages=[]), "invalid_request", "messages must be"),
        (chat("a", messages=[{"role": "user"}]), "invalid_request", "must have a content"),
        (chat("a", messages=[{"role": "user", "content": None}]), "invalid_request", "must have a content"),
        (completion("a", stop=0), "invalid_request", "stop must be a str | list, got 0"),
        (completion("a", stop={}), "invalid_request", "stop must be a str | list, got {}"),
        (chat("a", stop_token_ids={}), "invalid_request", "stop_token_ids must be a list, got {}"),
        (completion("a", allowed_token_ids=5), "invalid_request", "allowed_token_ids must be a list, got 5"),
        (chat("a", allowed_token_ids=[]), "invalid_request", "allowed_token_ids must be a list of at least one"),
        (chat("a", bad_words="word"), "invalid_request", "bad_words must be a list, got 'word'"),
        (chat("a", logprobs=3), "invalid_request", "logprobs must be a bool"),
        (chat("a", top_logprobs=3), "invalid_request", "top_logprobs needs"),
        (chat("a", max_completion_tokens=6), "invalid_request", "must agree"),
        (chat("a", chat_template_kwargs={"thinking": True}), "invalid_request", "got ['thinking']"),
        (chat("a", chat_template_kwargs={"messages": []}), "invalid_request", "cannot set"),
        (chat("a", chat_template_kwargs={"tokenize": True}), "invalid_request", "cannot set"),
        (chat("a", chat_template_kwargs={"self": 1}), "invalid_request", "got ['self']"),
    ],
)
def test_bad_lines_get_error_records(engine: FakeEngine, tmp_path: Path, line: object, code: str, message: str) -> None:
    records = run(engine, tmp_path, [completion("before"), line, chat("after")])
    assert [records[f"batch_req_{i}"]["response"]["status_code"] == 200 for i in (1, 2, 3)] == [True, False, True]
    record = records["batch_req_2"]
    assert record["error"]["code"] == record["response"]["body"]["error"]["code"] == code
    assert message in record["error"]["message"] == record["response"]["body"]["error"]["message"]
    assert engine.num_added <= 3  # "fine" of the two-prompt line, and nothing else of bad lines


def test_without_template_or_tokenizer_chats_are_refused(tmp_path: Path) -> None:
    plain = load_tokenizer(tiny_tokenizers.write(tmp_path / "t", tiny_tokenizers.byte_level()))
    for engine, hint in ((FakeEngine(plain), "chat_template"), (FakeEngine(None), "skip_tokenizer_init")):
        records = run(engine, tmp_path, [chat("a"), completion("b", [1, 2], n=2)])
        assert hint in records["batch_req_1"]["error"]["message"]
        assert records["batch_req_2"]["error"] is None
        (tmp_path / "out.jsonl").unlink()


def test_duplicates_are_refused_whichever_run_sees_them(engine: FakeEngine, tmp_path: Path) -> None:
    records = run(engine, tmp_path, [completion("a"), completion("b"), completion("a")])
    assert records["batch_req_3"]["error"]["code"] == "duplicate_custom_id"
    assert records["batch_req_3"]["custom_id"] == "a"
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"".join(line for line in out.read_bytes().splitlines(True) if b"batch_req_1" not in line))
    assert run(engine, tmp_path, [completion("a"), completion("b"), completion("a")]) == records


def test_blank_lines_and_a_missing_last_newline(engine: FakeEngine, tmp_path: Path) -> None:
    lines = [json.dumps(completion(i)).encode() for i in "ab"]
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\n  \n" + lines[1])
    summary = run_batch(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert (summary.num_records, summary.num_errors) == (2, 0)
    assert sorted(records_by_id(tmp_path / "out.jsonl")) == ["batch_req_1", "batch_req_4"]


def test_a_custom_id_of_another_type_stays_visible(engine: FakeEngine, tmp_path: Path) -> None:
    requests = [completion("a") | {"custom_id": 17}, completion("b")]
    records = run(engine, tmp_path, requests)
    assert records["batch_req_1"]["custom_id"] == 17
    assert records["batch_req_1"]["error"]["message"] == "custom_id must be a non-empty string, got 17"
    assert run(engine, tmp_path, requests) == records, "a restart reads its own records"


def test_messages_of_tool_calls_need_no_content(engine: FakeEngine) -> None:
    body = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
        ]
    }
    assert parse_body(CHAT, body, "tiny", (), engine.tokenizer, SamplingParams()).prompts


@pytest.mark.parametrize("where", ["parse_body", "Reply", "add_request"])
def test_an_unexpected_error_is_its_lines_alone(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    target = engine if where == "add_request" else batch_files
    original, calls = getattr(target, where), iter(range(3))

    def fails_once(*args: object, **options: object) -> object:
        if next(calls) == 1:
            raise ZeroDivisionError("by accident")
        return original(*args, **options)

    monkeypatch.setattr(target, where, fails_once)
    records = run(engine, tmp_path, [completion("a"), completion("b"), completion("c")])
    assert [records[f"batch_req_{i}"]["response"]["status_code"] for i in (1, 2, 3)] == [200, 500, 200]
    assert records["batch_req_2"]["custom_id"] == "b"
    assert records["batch_req_2"]["error"]["code"] == "internal_error"
    assert "ZeroDivisionError('by accident')" in records["batch_req_2"]["error"]["message"]
    assert "Traceback" in caplog.text
    assert "line 2 of the batch failed unexpectedly" in caplog.text


def test_a_lost_process_is_no_error_of_a_line(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise PeerLostError("process 1 is gone")

    monkeypatch.setattr(engine, "add_request", lose)
    with pytest.raises(PeerLostError):
        run(engine, tmp_path, [completion("a")])
    assert not (tmp_path / "out.jsonl").read_bytes()


_NAMES = sorted({*openai_format._FIELDS[CHAT], *openai_format._FIELDS[COMPLETIONS], "self", "\ud800", ""})
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "Hi"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*_NAMES, "role", "content", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_lines_end_nothing_but_themselves(engine: FakeEngine, tmp_path: Path, data: st.DataObject) -> None:
    """Every line has one record, however odd the values in and around its body are."""
    lines: list[object] = []
    for index in range(data.draw(st.integers(1, 4))):
        line = data.draw(st.sampled_from([completion, chat]))(f"odd {index}", max_tokens=2)
        line["body"] |= data.draw(st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=2))
        if "messages" in line["body"]:
            variables = st.dictionaries(st.sampled_from(["self", "tools", "messages", "x"]), _VALUES, max_size=2)
            line["body"]["chat_template_kwargs"] = data.draw(variables)
        line |= data.draw(st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body"]), _VALUES, max_size=1))
        lines.append(data.draw(st.sampled_from([line, line, line, data.draw(_VALUES)])))
    (tmp_path / "out.jsonl").unlink(missing_ok=True)
    records = run(engine, tmp_path, [*lines, completion("plain")])
    assert len(records) == len(lines) + 1
    assert records[f"batch_req_{len(lines) + 1}"]["error"] is None


def test_an_aborted_request_is_an_error(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = FakeEngine.step

    def aborting(self: FakeEngine) -> list:
        outputs = step(self)
        for output in outputs:
            if output.finished:
                output.outputs[0].finish_reason = "abort"
        return outputs

    monkeypatch.setattr(FakeEngine, "step", aborting)
    record = run(engine, tmp_path, [completion("a")])["batch_req_1"]
    assert record["response"]["status_code"] == 500
    assert record["error"]["code"] == "aborted"


# Bounds


@pytest.mark.parametrize("bound", [1, 5, None])
def test_requests_in_flight_stay_within_the_bound(engine: FakeEngine, tmp_path: Path, bound: int | None) -> None:
    requests = [completion(str(i), ["a", "b", "c"] if i % 5 == 0 else "a") for i in range(100)]
    run(engine, tmp_path, requests, max_in_flight=bound)
    assert engine.most_unfinished == (bound or 3 * engine.max_num_seqs)


def test_a_request_wider_than_the_bound_goes_alone(engine: FakeEngine, tmp_path: Path) -> None:
    records = run(engine, tmp_path, [completion("a"), completion("b", n=9), completion("c")], max_in_flight=4)
    assert engine.most_unfinished == 9
    assert all(r["error"] is None for r in records.values())


def test_input_is_read_no_further_than_the_window(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The first step comes once the window is full, whatever the length of the file."""
    engine = FakeEngine(tokenizer, max_num_seqs=3)
    write_lines(tmp_path / "in.jsonl", [completion(str(i)) for i in range(50)])
    added = []

    def stopping() -> list:
        added.append(engine.num_added)
        raise KeyboardInterrupt

    engine.step = stopping
    with pytest.raises(KeyboardInterrupt):
        run_batch(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert added == [9]
    assert not engine.has_unfinished()


# Restarts


def test_ten_kills_lose_and_repeat_nothing(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_requests(300))
    command = [sys.executable, fake_engine.__file__, "batch", "--model", str(tokenizer_dir), str(tmp_path / "in.jsonl")]
    whole_path, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    subprocess.run([*command, str(whole_path)], check=True, stderr=subprocess.DEVNULL)
    monkeypatch.setenv(fake_engine.STEP_S, "0.0005")
    kills = run_with_kills([*command, str(out)], out, 10, seed=1, most_bytes=whole_path.stat().st_size // 8)
    assert kills == 10
    whole = records_by_id(whole_path)
    assert len(whole) == 300
    assert records_by_id(out) == whole


@pytest.fixture(scope="module")
def finished(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("finished")
    run(FakeEngine(tokenizer), folder, mixed_requests(12))
    return folder, (folder / "out.jsonl").read_bytes()


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_torn_output_resumes(tokenizer: Tokenizer, finished: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, whole = finished
    out = folder / "torn.jsonl"
    cut = data.draw(st.integers(0, len(whole)))
    out.write_bytes(whole[:cut])
    engine = FakeEngine(tokenizer)
    summary = run_batch(engine, folder / "in.jsonl", out, use_tqdm=False)
    assert summary.num_resumed == whole[:cut].count(b"\n")
    assert summary.num_records == 12
    assert records_by_id(out) == records_by_id(folder / "out.jsonl")
    assert summary.num_errors == sum(b'"status_code": 200' not in line for line in whole.splitlines())
    again = run_batch(engine, folder / "in.jsonl", out, use_tqdm=False)
    assert (again.num_resumed, again.completion_tokens) == (12, 0)


def test_an_interrupt_leaves_a_resumable_file(engine: FakeEngine, finished: tuple[Path, bytes], tmp_path: Path) -> None:
    folder, _ = finished
    step, steps = engine.step, iter(range(7))

    def interrupted() -> list:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        run_batch(engine, folder / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert not engine.has_unfinished()
    engine.step = step
    summary = run_batch(engine, folder / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert 0 < summary.num_resumed < 12
    assert records_by_id(tmp_path / "out.jsonl") == records_by_id(folder / "out.jsonl")


def test_a_finished_batch_is_known_without_an_engine(engine: FakeEngine, tmp_path: Path) -> None:
    paths = (write_lines(tmp_path / "in.jsonl", [completion("a"), completion("b", bad=1)]), tmp_path / "out.jsonl")
    assert find_finished(*paths, seed=0) is None
    assert not paths[1].exists()
    run_batch(engine, *paths, use_tqdm=False)
    summary = find_finished(*paths, seed=0)
    assert (summary.num_records, summary.num_errors, summary.num_resumed, summary.completion_tokens) == (2, 1, 2, 0)
    with pytest.raises(ConfigError, match="another seed"):
        find_finished(*paths, seed=1)
    with paths[0].open("a") as file:
        file.write(json.dumps(completion("c")))
    assert find_finished(*paths, seed=0) is None


def test_lines_may_be_added_to_the_input(engine: FakeEngine, tmp_path: Path) -> None:
    first = run(engine, tmp_path, [completion("a"), completion("b")])
    assert run(engine, tmp_path, [completion("a"), completion("b"), completion("c")]).items() > first.items()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda requests, out: requests[1]["body"].update(prompt="x"), "line 2 is of another request"),
        (lambda requests, out: requests.reverse(), "of another request"),
        (lambda requests, out: requests.pop(), "lines that the input does not have"),
        (lambda requests, out: requests.insert(0, completion("new")), "of another request"),
        (lambda requests, out: out.write_text("my notes\n"), "its line 1 is no record"),
        (lambda requests, out: out.write_text("my notes"), "its last line is no record"),
        (lambda requests, out: out.write_bytes(out.read_bytes() * 2), "two records of line"),
        (lambda requests, out: out.write_bytes(out.read_bytes() + b"\0\0\n"), "its line 4 is no record"),
        (
            lambda requests, out: out.write_bytes(out.read_bytes().replace(b"_req_3", b"_req_99999999999")),
            "lines that the input does not have",
        ),
    ],
)
def test_the_output_of_something_else_is_refused_and_kept(
    engine: FakeEngine, tmp_path: Path, change: object, reason: str
) -> None:
    requests = [completion("a"), completion("b"), completion("c")]
    run(engine, tmp_path, requests)
    out = tmp_path / "out.jsonl"
    change(requests, out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=f"{reason}.*choose another output file"):
        run(engine, tmp_path, requests)
    assert out.read_bytes() == before


def test_another_run_seed_is_another_batch(engine: FakeEngine, tmp_path: Path) -> None:
    run(engine, tmp_path, [completion("a")], seed=1)
    with pytest.raises(ConfigError, match="another seed"):
        run(engine, tmp_path, [completion("a")], seed=2)


def test_two_processes_cannot_write_one_output(engine: FakeEngine, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [completion("a")])
    entered, leave = threading.Event(), threading.Event()
    step = engine.step

    def waiting() -> list:
        entered.set()
        leave.wait(10)
        return step()

    engine.step = waiting
    paths = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    thread = threading.Thread(target=run_batch, args=(engine, *paths), kwargs={"use_tqdm": False})
    thread.start()
    assert entered.wait(10)
    with pytest.raises(ConfigError, match="another process is writing"):
        run_batch(FakeEngine(engine.tokenizer), *paths, use_tqdm=False)
    leave.set()
    thread.join()
    assert len(records_by_id(paths[1])) == 1


def test_unusable_files_say_so(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the batch input .*: No such file"):
        run_batch(engine, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="must be a regular file"):
        run_batch(engine, os.devnull, tmp_path / "out.jsonl")
    source = write_lines(tmp_path / "in.jsonl", [completion("a")])
    with pytest.raises(ConfigError, match=r"cannot write the batch output .*: No such file"):
        run_batch(engine, source, tmp_path / "no" / "out.jsonl")
    with pytest.raises(ConfigError, match="does not belong to this batch"):
        run_batch(engine, source, source)


def test_everything_is_synced_at_the_end(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(batch_output.os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    run(engine, tmp_path, [completion(str(i)) for i in range(20)])
    assert sizes[-1] == (tmp_path / "out.jsonl").stat().st_size
    assert len(sizes) < 5

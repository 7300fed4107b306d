"""Lines of a batch that fail, each alone."""

import json
from pathlib import Path

import pytest
import tiny_tokenizers
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killing import records_by_id

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import PeerLostError
from jaxserve.openai import batch_files, batch_lines, batch_output
from jaxserve.openai import format as openai_format
from jaxserve.openai.batch_files import run_batch
from jaxserve.openai.context import BodyContext
from jaxserve.openai.format import CHAT, COMPLETIONS, parse_body
from jaxserve.openai.interfaces import Interface
from jaxserve.text.loading import load_tokenizer
from tests.openai.batches import chat, completion, run
from tests.random_runs import examples

TOO_LONG = {"role": "user", "content": "x" * 100_000}


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
        (completion("a", messages=[]), "unsupported_parameter", "['messages'] in the body; supported"),
        (completion("a", max_tokns=5), "unsupported_parameter", "['max_tokns'] in the body (did you mean max_tokens?)"),
        (chat("a", prompt="x"), "unsupported_parameter", "['prompt'] in the body"),
        (completion("a", stream=True), "unsupported_value", "stream must be false, got True: a line of a batch file"),
        (
            completion("a", max_tokens=1001),
            "invalid_value",
            "max_tokens=1001 cannot be greater than max_model_len=1000",
        ),
        (chat("a", max_tokens=None, max_completion_tokens=1001), "invalid_value", "max_completion_tokens=1001 cannot"),
        (completion("a", echo=1), "invalid_request", "echo must be a bool"),
        (completion("a", store=0), "unsupported_value", "store must be false, got 0: it is not supported"),
        (completion("a", suffix="x"), "unsupported_value", 'suffix must be "", got'),
        (completion("a", best_of=3, n=2), "unsupported_value", "best_of must be 1 or n, got 3"),
        (completion("a", best_of=True), "unsupported_value", "best_of must be 1 or n, got True"),
        (completion("a", stream_options={}), "unsupported_value", "stream_options must be left out, got {}"),
        (chat("a", response_format={"type": "xml"}), "invalid_request", "must have the type text, json_object or"),
        (chat("a", response_format={"type": "json_schema"}), "invalid_request", "must have a schema in json_schema"),
        (chat("a", tools=[{"type": "function"}]), "invalid_request", "tools must be of the form"),
        (chat("a", service_tier="flex"), "unsupported_value", """must be "auto" or "default", got 'flex'"""),
        (chat("a", user=5), "invalid_request", "user must be a string"),
        (chat("a", metadata="x"), "invalid_request", "metadata must be an object"),
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
        (completion("a", stop=0), "invalid_request", "stop must be a non-empty string or a list of them, got 0"),
        (completion("a", stop={}), "invalid_request", "stop must be a non-empty string or a list of them, got {}"),
        (
            chat("a", stop_token_ids={}),
            "invalid_request",
            "stop_token_ids must be a list of at most 64 token ids, got {}",
        ),
        (
            completion("a", allowed_token_ids=5),
            "invalid_request",
            "allowed_token_ids must be a list of at least one token id, got 5",
        ),
        (chat("a", allowed_token_ids=[]), "invalid_request", "allowed_token_ids must be a list of at least one"),
        (chat("a", bad_words="word"), "invalid_request", "strings that are not blank, got 'word'"),
        (chat("a", logprobs=3), "invalid_request", "logprobs must be a bool"),
        (chat("a", top_logprobs=3), "invalid_request", "top_logprobs needs"),
        (chat("a", max_completion_tokens=6), "invalid_request", "must agree"),
        (chat("a", messages=[TOO_LONG]), "context_length_exceeded", "maximum context length is 1000 tokens"),
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


def test_a_long_chat_that_is_truncated_is_served(engine: FakeEngine, tmp_path: Path) -> None:
    line = chat("a", messages=[TOO_LONG], truncate_prompt_tokens=10)
    assert run(engine, tmp_path, [line])["batch_req_1"]["error"] is None


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
    by_custom_id = {record["custom_id"]: record for record in records.values()}
    assert by_custom_id["a"]["error"] is None, "a join finds the record of the first line"
    assert by_custom_id[None] == records["batch_req_3"]
    assert "got 'a' again" in records["batch_req_3"]["error"]["message"]
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
    assert parse_body(CHAT, body, BodyContext("tiny", (), engine.tokenizer, SamplingParams())).prompts


@pytest.mark.parametrize("where", ["parse", "new_reply", "add_request"])
def test_an_unexpected_error_is_its_lines_alone(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    target = {"add_request": engine, "new_reply": Interface}.get(where, batch_files)
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


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("num_more", [-1, 0, 1, 5, 3 * 4096, 10**6])
def test_a_line_that_is_too_long_fails_alone(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_more: int
) -> None:
    for module in (batch_lines, batch_output):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 4096)
    long = json.dumps(completion("long", metadata={"a": ""})).encode()
    long = long.replace(b'"a": ""', b'"a": "' + b"x" * (4096 + num_more - len(long)) + b'"')
    assert len(long) == 4096 + num_more
    lines = [completion("a"), long, b"", long.replace(b'"long"', b'"last"'), completion("b")]
    records = run(engine, tmp_path, lines)
    codes = [records[f"batch_req_{number}"]["response"]["status_code"] for number in (1, 2, 4, 5)]
    assert codes == ([200, 400, 400, 200] if num_more > 0 else [200] * 4)
    summary = run_batch(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert (summary.num_records, summary.num_resumed) == (4, 4), "a resumed run knows the lines again"
    assert summary.num_errors == (2 if num_more > 0 else 0)


def test_a_chat_that_is_too_long_is_not_encoded(engine: FakeEngine, tmp_path: Path) -> None:
    text = "a" * (300 * engine.schedule.max_total_tokens)
    records = run(engine, tmp_path, [chat("a", messages=[{"role": "user", "content": text}]), completion("b")])
    assert "at least" in records["batch_req_1"]["error"]["message"]
    assert records["batch_req_2"]["response"]["status_code"] == 200

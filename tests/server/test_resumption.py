"""Resumption: a stream cut after any of its parts continues with the same tokens, as if it had not been cut."""

import json
from typing import Any

import httpx
import pytest

from jaxserve.openai.resumption import COMMENT, HEADER, Delivered, ReplyIdentity, split_at_comments
from tests.server.conftest import Running

IDENTITY = ReplyIdentity("abc123", 1_700_000_000, 12345)
HEADERS = {HEADER.decode(): IDENTITY.header().decode()}
MESSAGES = [{"role": "user", "content": "Say something about queues."}]
SAMPLED = {"max_tokens": 12, "stream": True, "temperature": 1.0}
DIGITS = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "def f(", "stream_options": {"include_usage": True}}),
    "prompts, samples, penalties": (
        "/v1/completions",
        {"prompt": ["def ", "class Q"], "n": 2, "frequency_penalty": 0.5, "min_tokens": 3},
    ),
    "stop string": ("/v1/completions", {"prompt": "def f(", "stop": ["e"], "max_tokens": 40}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
    "constrained": ("/v1/chat/completions", {"messages": MESSAGES, "response_format": DIGITS}),
    "response": ("/v1/responses", {"input": "Hello", "max_tokens": None, "max_output_tokens": 12}),
    "message": ("/v1/messages", {"messages": MESSAGES}),
}


def body_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return a request's path and body."""
    path, fields = REQUESTS[name]
    return path, {key: value for key, value in (SAMPLED | fields).items() if value is not None}


def stream(client: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    """Return all bytes of a streamed reply."""
    with client.stream("POST", path, json=body, headers=headers) as reply:
        data = reply.read()
        assert reply.status_code == 200, data
    return data


def parts(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the parts of a stream, each with the comment after it; the last one has none."""
    found = []
    while data:
        before, comment, rest = data.partition(COMMENT)
        line, _, data = rest.partition(b"\n\n")
        found.append((before, comment + line))
    return found


def merged(data: bytes) -> Any:
    """Return what a client reads from a stream, whatever its parts, but for times and cached tokens."""
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    objects = [json.loads(event) for event in events if event != b"[DONE]"]
    joined: dict[str, str] = {}
    for each in objects:
        for choice in each.get("choices", ()):
            for key, text in choice.get("delta", {"text": choice.get("text")}).items():
                name = f"{choice['index']} {key}"
                joined[name] = joined.get(name, "") + (text or "")
            joined[f"{choice['index']} end"] = joined.get(f"{choice['index']} end", "") + str(
                choice["finish_reason"] or ""
            )
        if isinstance(delta := each.get("delta"), str):
            joined["text"] = joined.get("text", "") + delta
        elif isinstance(delta, dict):
            joined["text"] = joined.get("text", "") + delta.get("text", "") + (delta.get("stop_reason") or "")
    last = objects[-1]
    response = last.get("response", {})
    usage = response.pop("usage", None) or last.get("usage") or {}
    counts = {key: count for key, count in usage.items() if isinstance(count, int) and "cache" not in key}
    response.pop("completed_at", None)
    return joined, {each.get("id") for each in objects}, response, counts, data[-14:]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_cut_stream_continues_with_the_same_tokens(server: Running, name: str) -> None:
    path, body = body_of(name)
    whole = stream(server.client, path, body, HEADERS)
    cut = parts(whole)
    plain = b"".join(part for part, _ in cut)
    assert len(cut) > 3
    assert cut[0][1], "the first events have a comment"
    for stop in {1, 2, len(cut) // 2, len(cut) - 2, len(cut) - 1}:
        delivered = Delivered()
        for _, comment in cut[:stop]:
            delivered.add(comment)
        data = stream(server.client, path, body | {"resume": delivered.body_field()}, HEADERS)
        resumed = b"".join(part for part, _ in cut[:stop]) + b"".join(part for part, _ in parts(data))
        assert merged(resumed) == merged(plain)
        if path == "/v1/responses":
            numbers = [
                json.loads(line[6:]).get("sequence_number") for line in resumed.split(b"\n") if b"ence_nu" in line
            ]
            assert numbers == list(range(len(numbers)))


def test_continued_tokens_are_computed_as_a_prompt(server: Running) -> None:
    """The tokens that the client has got take part of a step, not a step each."""
    path, body = body_of("completion")
    body |= {"max_tokens": 30}
    cut = parts(stream(server.client, path, body, HEADERS))
    delivered = Delivered()
    for _, comment in cut[:-3]:
        delivered.add(comment)
    num_left = 30 - len(delivered.samples[0, 0].token_ids)
    before = server.engine.stats.num_sampled_tokens
    stream(server.client, path, body | {"resume": delivered.body_field()}, HEADERS)
    assert 0 < num_left < 25
    assert server.engine.stats.num_sampled_tokens - before <= num_left + 8  # one multi-step program may sample more


def test_a_whole_reply_is_the_same_again(server: Running) -> None:
    path, body = body_of("chat")
    replies = [server.client.post(path, json=body | {"stream": False}, headers=HEADERS).json() for _ in range(2)]
    assert replies[0] == replies[1]
    assert replies[0]["id"].endswith("abc123")
    assert replies[0]["created"] == 1_700_000_000


def test_without_the_header_streams_have_no_comments(server: Running) -> None:
    path, body = body_of("completion")
    assert b"\n:" not in stream(server.client, path, body, {})


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ({"num_events": 0}, "must have num_events, and samples"),
        ({"num_events": 0, "samples": [[0, 0, [1, -1], 0, False]]}, "must have num_events, and samples"),
        ({"num_events": 0, "samples": [[0, 1, [5], 0, False]]}, "got prompt 0, sample 1"),
        ({"num_events": 0, "samples": [[0, 0, [10**6], 0, False]]}, "vocabulary"),
        ({"num_events": 0, "samples": [[0, 0, [5] * 12, 0, False]]}, "got 12 that end it"),
    ],
)
def test_a_wrong_position_is_refused(server: Running, resume: dict[str, Any], message: str) -> None:
    path, body = body_of("completion")
    reply = server.client.post(path, json=body | {"resume": resume}, headers=HEADERS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "resume")
    assert message in reply.json()["error"]["message"]


def test_a_wrong_identity_is_refused(server: Running) -> None:
    path, body = body_of("completion")
    reply = server.client.post(path, json=body, headers={HEADER.decode(): "a b"})
    assert reply.status_code == 400
    assert "must be a name, a date and a seed, got 'a b'" in reply.json()["error"]["message"]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_comments_are_found_in_any_fragments(size: int) -> None:
    data = b"data: a\n\n:jaxserve [0,0,[]]\n\ndata: b\n\ndata: c\n\n:jaxserve [1,0,[[0,[7],1,0]]]\n\ndata: [DONE]\n\n"
    kept, events, comments = b"", b"", []
    for start in range(0, len(data), size):
        before, found, kept = split_at_comments(kept + data[start : start + size])
        events += before
        comments += found
    assert events == b"data: a\n\ndata: b\n\ndata: c\n\n"
    assert kept == b"data: [DONE]\n\n"
    assert comments == [b"[0,0,[]]", b"[1,0,[[0,[7],1,0]]]"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_texts_may_contain_what_comments_begin_with(size: int) -> None:
    events = [b'data: {"text": ":jaxserve [0"}\n\n', b'data: {"text": ":jaxserve "}\n\n']
    data = b"".join(event + b":jaxserve [%d,0,[]]\n\n" % index for index, event in enumerate(events))
    kept, sent, comments = b"", b"", []
    for start in range(0, len(data), size):
        before, found, kept = split_at_comments(kept + data[start : start + size])
        sent += before
        comments += found
    assert (sent, comments, kept) == (b"".join(events), [b"[0,0,[]]", b"[1,0,[]]"], b"")

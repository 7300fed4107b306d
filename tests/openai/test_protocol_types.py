"""Bodies against the types of OpenAI's own package, which are generated from its specification of the interface."""

import json
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
import tiny_tokenizers
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from jaxserve.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.stream_events import OutputReader
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import CHAT, COMPLETIONS, ParsedRequest, parse_body
from jaxserve.openai.replies import Reply
from jaxserve.text.loading import load_tokenizer

with tempfile.TemporaryDirectory() as directory:
    files = tiny_tokenizers.write(Path(directory), tiny_tokenizers.byte_level(), chat_template="[bot]")
    tokenizer = load_tokenizer(files)

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "p"},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "p"}]},
}
LOGPROBS: dict[str, dict[str, Any]] = {COMPLETIONS: {"logprobs": 1}, CHAT: {"logprobs": True, "top_logprobs": 1}}
WHOLE: dict[str, type[BaseModel]] = {COMPLETIONS: Completion, CHAT: ChatCompletion}
CHUNK: dict[str, type[BaseModel]] = {COMPLETIONS: Completion, CHAT: ChatCompletionChunk}


def parsed(path: str, body: dict[str, Any]) -> ParsedRequest:
    return parse_body(path, body, BodyContext("m", (), tokenizer, SamplingParams(), may_stream=True))


def check(model: type[BaseModel], content: Any, *, is_chunk: bool = False) -> None:
    """Check a body against the schema of a type."""
    if is_chunk and model is Completion:  # chunks of completions have no type of their own: their ends come last
        content = content | {
            "choices": [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in content["choices"]]
        }
    jsonschema.validate(content, model.model_json_schema())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_replies_have_their_types(path: str, has_logprobs: bool) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    request = parsed(path, BODIES[path] | options | (LOGPROBS[path] if has_logprobs else {}))
    completions = [CompletionOutput(i, logprobs=[] if has_logprobs else None) for i in range(2)]
    output = RequestOutput("0", "p", [7, 8], completions)
    reply = Reply(request, None, response_id="x", created_s=1)
    reader, events = OutputReader(output), list(reply.first_events())
    for text in "ab😀":
        for completion in completions:
            completion.text += text
            completion.token_ids.append(5)
            if completion.logprobs is not None:
                completion.logprobs = [*completion.logprobs, {5: Logprob(-0.5, 1, text)}]
            completion.finish_reason = "length" if text == "😀" else None
        events += reply.events(0, output, reader.read())
    events += reply.last_events([output])
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert len(chunks) > 6
    for chunk in chunks:
        check(CHUNK[path], chunk, is_chunk=True)
    check(WHOLE[path], Reply(request, None, response_id="x", created_s=1).body([output]))


@pytest.mark.parametrize(
    ("path", "params"),
    [(COMPLETIONS, completion_params.CompletionCreateParams), (CHAT, chat_params.CompletionCreateParams)],
)
def test_no_field_is_dropped(path: str, params: Any) -> None:
    """Every field of the interface is read, named as ignored, or refused by its name."""
    fields = {name for variant in params.__args__ for name in variant.__annotations__}
    for name in sorted(fields):
        try:
            request = parsed(path, BODIES[path] | {name: {"strange": 1}})
        except BadRequestError as error:
            assert name in (error.param, {"max_tokens": "max_completion_tokens"}.get(error.param or ""))  # noqa: PT017
            continue
        assert name in request.ignored, name

"""Requests over HTTP by OpenAI's client, against the same requests in Python."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import transformers

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.offline.llm import LLM
from tests.server.conftest import Running

GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1}
CHAT = [{"role": "user", "content": "tell me of engines"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def offline(llm: LLM, prompt: Any, **params: Any) -> Any:
    """Return the output of a prompt in Python."""
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def test_models(client: openai.OpenAI, server: Running) -> None:
    for card in server.client.get("/v1/models").json()["data"]:
        jsonschema.validate(card, openai.types.Model.model_json_schema())
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7, 8]])
def test_completion_equals_offline(client: openai.OpenAI, llm: LLM, prompt: Any) -> None:
    reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, logprobs=2, **GREEDY)
    expected = offline(llm, prompt, max_tokens=12, logprobs=2, **GREEDY).outputs[0]
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [
        table[token].logprob for table, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]


def test_many_prompts_and_samples_have_their_own_choices(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["a b", "c d", "e f"]
    reply = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=5, temperature=1, seed=3)
    assert [choice.index for choice in reply.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        expected = offline(llm, prompt, n=2, max_tokens=5, temperature=1, seed=3 + number)
        texts = [choice.text for choice in reply.choices[2 * number : 2 * number + 2]]
        assert texts == [output.text for output in expected.outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 4},
        {"stop": ["e", "th"]},
        {"logprobs": True, "top_logprobs": 3},
        {"max_tokens": 1},
        {"extra_body": {"ignore_eos": True, "min_tokens": 4, "top_k": 5}},
    ],
)
def test_streamed_chat_equals_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    common: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 24} | GREEDY | options
    whole = client.chat.completions.create(**common)
    stream = client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
    texts = dict.fromkeys(range(options.get("n", 1)), "")
    reasons: dict[int, str] = {}
    logprobs: list[Any] = []
    usage = None
    roles = []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            logprobs += (choice.logprobs.content or []) if choice.logprobs else []
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert roles == ["assistant"] * len(texts)
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    if options.get("logprobs"):
        assert whole.choices[0].logprobs is not None
        assert logprobs == whole.choices[0].logprobs.content


def test_loglikelihood_of_a_prompt(client: openai.OpenAI, llm: LLM) -> None:
    """Evaluation harnesses send lists of token ids, and read the prompt's log probabilities."""
    prompts = [[0, 9, 8, 7, 6], [0, 5, 4]]
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "temperature": 0}
    reply = client.completions.create(model="tiny", prompt=prompts, max_tokens=1, **options)
    none = client.completions.create(model="tiny", prompt=prompts, max_tokens=0, **options)
    for prompt, choice, bare in zip(prompts, reply.choices, none.choices, strict=True):
        expected = offline(llm, prompt, max_tokens=1, prompt_logprobs=1, temperature=0)
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:-1] == [
            expected.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))
        ]
        assert len(found.tokens) == len(prompt) + 1
        assert isinstance(found.top_logprobs[1], dict)
        for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True):
            ranked = list(top.values())[1:]
            assert next(iter(top)) == token, "the token itself, then the others by rank"
            assert ranked == sorted(ranked, reverse=True)
        assert bare.logprobs is not None
        assert bare.logprobs.token_logprobs == found.token_logprobs[:-1]
    assert none.usage is not None
    assert none.usage.completion_tokens == 0


def test_fields_are_honoured_named_or_refused(server: Running) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
    reply = server.client.post("/v1/completions", json=body | {"user": "me", "store": False, "metadata": {}})
    assert reply.status_code == 200
    assert reply.headers["x-ignored-params"] == "metadata,store,user"
    for field, value, said in [
        ("guided_json", {}, "structured_outputs"),
        ("store", True, "store"),
        ("temperature", "hot", "temperature"),
        ("audio", {}, "audio"),
        ("logit_bias", {"9999999": 1}, "token ids in logit_bias"),
        ("logprobs", 10**6, "max_logprobs"),
        ("prompt", [1] * 200, "reduce the length"),
        ("stream_options", {"include_usage": True}, "stream: true"),
    ]:
        reply = server.client.post("/v1/completions", json=body | {field: value})
        assert reply.status_code == 400, field
        error = reply.json()["error"]
        assert error["param"] == field
        assert said in error["message"]
    assert server.client.post("/v1/completions", json=body | {"model": "other"}).status_code == 404
    assert server.client.post("/v1/other", json=body).status_code == 404
    assert server.client.get("/v1/completions").status_code == 405


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_outputs_follow_their_schema(client: openai.OpenAI, server: Running) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
    whole = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=1, seed=5, max_tokens=40, response_format=form
    )
    content = whole.choices[0].message.content or ""
    if whole.choices[0].finish_reason == "stop":
        jsonschema.validate(json.loads(content), SCHEMA)
    assert content.lstrip().startswith("{")
    body = {"prompt": "a", "temperature": 1, "max_tokens": 30, "structured_outputs": {"regex": "[0-9]{3}"}}
    choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
    assert re.fullmatch("[0-9]{3}", choice["text"])
    assert choice["finish_reason"] == "stop"


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("not", {"not": {"type": "string"}}),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("contains", {"type": "array", "contains": {"type": "integer"}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
]


def test_what_cannot_be_followed_is_refused_by_its_keyword(server: Running) -> None:
    for keyword, schema in REFUSED:
        form = {"json_schema": {"name": "x", "schema": schema}, "type": "json_schema"}
        own = {"type": "json_schema", "name": "x", "schema": schema}
        chat = {"messages": CHAT, "max_tokens": 4}
        for path, body, param in (
            ("completions", {"prompt": "a", "structured_outputs": {"json": schema}}, "structured_outputs"),
            ("chat/completions", chat | {"response_format": form}, "response_format"),
            ("responses", {"input": "a", "text": {"format": own}}, "text"),
        ):
            reply = server.client.post(f"/v1/{path}", json=body)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == param
            assert keyword in re.findall(r"\w+", error["message"]), error


def test_a_model_that_generates_does_not_pool(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"needs a model that pools.*--runner pooling") as refused:
        client.embeddings.create(model="tiny", input="a")
    assert (refused.value.param, refused.value.code) == ("model", "model_does_not_pool")


def test_further_fields_of_vllm(server: Running) -> None:
    post = server.client.post
    body = {"prompt": "a", "max_tokens": 3, "logprobs": 1, "temperature": 0, "return_token_ids": True}
    plain = post("/v1/completions", json=body).json()["choices"][0]
    named = post("/v1/completions", json=body | {"return_tokens_as_token_ids": True, "request_id": "mine-1"}).json()
    choice = named["choices"][0]
    assert named["id"] == "cmpl-mine-1"
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in plain["token_ids"]]
    assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert choice["logprobs"]["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    messages = [*CHAT, {"role": "assistant", "content": "It was"}]
    chat = {"messages": messages, "max_tokens": 1, "echo": None, "return_token_ids": True}
    for extra in ({"continue_final_message": True}, {"documents": [{"text": "a"}]}):
        reply = post("/v1/chat/completions", json=chat | extra)
        assert reply.status_code == (200 if "continue_final_message" in extra else 400), reply.text
    assert reply.json()["error"]["param"] == "documents"
    refused: list[dict[str, Any]] = [{"continue_final_message": True, "add_generation_prompt": True}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    refused += [{"continue_final_message": True, "messages": [*CHAT, called]}, {"request_id": "a b"}]
    refused += [{"chat_template": "x"}]
    for extra in refused:
        reply = post("/v1/chat/completions", json=chat | extra)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(extra)))


def test_tokens_there_and_back(server: Running, llama: Path) -> None:
    text = "Once upon a time 東京"
    reply = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(llama)
    assert reply["token_strs"] == tokenizer.convert_ids_to_tokens(reply["tokens"])
    assert server.client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}
    chat = server.client.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    assert "[bot]" in server.client.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    refused = server.client.post("/detokenize", json={"tokens": [1, 10**6]})
    assert refused.status_code == 400
    assert "got 1000000 at index 1; that is out of vocabulary" in refused.json()["error"]["message"]


def test_token_ids_of_a_stream_add_up(server: Running) -> None:
    body = {"prompt": "a b", "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    whole = server.client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    lines = server.client.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole

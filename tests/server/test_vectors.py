"""Embeddings and labels over HTTP and in batch files, against the same requests in Python."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.assembly.engine import Engine
from jaxserve.offline.llm import LLM
from jaxserve.openai.batch_files import run_batch
from tests.e2e.sizes import SIZES
from tests.e2e.test_pooling import write_classifier
from tests.server.conftest import Running, running

TEXTS = ["Once upon", "a time there were", "three"]


@pytest.fixture(scope="module")
def embedder(llama: Path) -> Iterator[LLM]:
    with LLM(str(llama), convert="embed", **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Running]:
    """Return a server of embeddings."""
    engine = Engine(EngineConfig(str(llama), convert="embed", **SIZES))
    with running(engine, served_model_name=["tiny"], max_prompts=4) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("content", ["a text", TEXTS, [5, 6, 7], [[5, 6, 7], [8]]])
@pytest.mark.parametrize("options", [{}, {"dimensions": 8, "encoding_format": "float"}])
def test_embeddings_equal_offline(client: openai.OpenAI, embedder: LLM, content: Any, options: dict[str, Any]) -> None:
    reply = client.embeddings.create(model="tiny", input=content, **options)  # base64 unless it is told otherwise
    params = PoolingParams(dimensions=options.get("dimensions"))
    expected = embedder.embed(content, pooling_params=params, use_tqdm=False)
    assert [entry.index for entry in reply.data] == list(range(len(expected)))
    for entry, wanted in zip(reply.data, expected, strict=True):
        np.testing.assert_allclose(entry.embedding, wanted.outputs.embedding, rtol=0, atol=1e-6)
    num_tokens = sum(len(output.prompt_token_ids) for output in expected)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)


def test_vllms_path(server: Running, embedder: LLM) -> None:
    (expected,) = embedder.encode(TEXTS[0], PoolingParams(normalize=False), use_tqdm=False)
    for switch in ("normalize", "use_activation"):
        body = {"input": TEXTS[0], "encoding_format": "base64", switch: False, "task": "embed"}
        defaults = {"embed_dtype": "float32", "endianness": "native", "padding": "do_not_pad"}
        (entry,) = server.client.post("/pooling", json=body | defaults).json()["data"]
        vector = np.frombuffer(base64.b64decode(entry["data"]), np.float32)
        np.testing.assert_allclose(vector, expected.outputs.data, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/rerank", {"query": TEXTS[0], "documents": TEXTS}),
        ("/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
    ],
)
def test_invocations(server: Running, path: str, body: dict[str, Any]) -> None:
    replies = [server.client.post(each, json=body).json() for each in (path, "/invocations")]
    results = [reply.get("data", reply.get("results")) for reply in replies]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {"input": []}, "input", "input must be a string, a list of strings"),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, "dimensions", "dimensions must be at most 64"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "must be one of"),
        ("/v1/embeddings", {"input": "a", "temperature": 0}, "temperature", "unsupported fields"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "model must be one of"),
        ("/v1/embeddings", {"input": [5] * 65}, "input", "maximum context length is 64 tokens"),
        ("/v1/embeddings", {"input": ["a"] * 5}, "input", "input must be at most 4 prompts, got 5"),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": 65},
            "truncate_prompt_tokens",
            "at most max_model_len 64, got 65",
        ),
        ("/classify", {"input": "a", "encoding_format": "base64"}, "encoding_format", "unsupported fields"),
        ("/pooling", {"input": "a", "task": "classify"}, "task", "the task must be 'embed' with this model"),
        ("/pooling", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", 'must be "float32", got'),
        ("/classify", {"input": "a"}, "model", "the task must be 'embed' with this model"),
        ("/v1/completions", {"prompt": "a"}, "model", "this engine pools"),
    ],
)
def test_errors(server: Running, path: str, body: dict[str, Any], param: str | None, message: str) -> None:
    reply = server.client.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code in (400, 404)
    assert message in error["message"]
    assert error["param"] == param


def test_labels(tmp_path: Path) -> None:
    write_classifier(tmp_path, "llama", id2label={0: "no", 1: "perhaps", 2: "yes"})
    engine = Engine(EngineConfig(str(tmp_path), skip_tokenizer_init=True, **SIZES))
    with running(engine) as server:
        (entry,) = server.client.post("/classify", json={"input": [5, 6, 7]}).json()["data"]
    assert entry["num_classes"] == len(entry["probs"]) == 3
    assert sum(entry["probs"]) == pytest.approx(1)
    assert entry["label"] == ["no", "perhaps", "yes"][int(np.argmax(entry["probs"]))]


def test_batch_files(embedder: LLM, tmp_path: Path) -> None:
    bodies = [{"input": TEXTS}, {"input": TEXTS[0], "encoding_format": "base64"}, {"input": "a", "stream": True}]
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": body}
        for index, body in enumerate(bodies)
    ]
    lines.append({"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}})
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    summary = run_batch(embedder, tmp_path / "in", tmp_path / "out", use_tqdm=False)
    assert (summary.num_records, summary.num_errors) == (4, 2)
    records = {record["custom_id"]: record for record in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    vectors = [np.array(output.outputs.embedding) for output in embedder.embed(TEXTS, use_tqdm=False)]
    for entry, vector in zip(records["0"]["response"]["body"]["data"], vectors, strict=True):
        np.testing.assert_allclose(entry["embedding"], vector, rtol=0, atol=1e-6)
    packed = base64.b64decode(records["1"]["response"]["body"]["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(packed, np.float32), vectors[0], rtol=0, atol=1e-6)
    assert "this engine pools" in records["text"]["error"]["message"]

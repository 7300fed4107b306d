"""Scores and ranks over HTTP, against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import torch
import transformers

from jaxserve.api.config import EngineConfig
from jaxserve.api.pooling_params import Pooler
from jaxserve.assembly.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.offline.llm import LLM
from jaxserve.openai.context import BodyContext
from jaxserve.openai.scoring import parse_scoring
from tests.e2e.sizes import SIZES, VOCAB_SIZE
from tests.e2e.test_pooling import write_classifier
from tests.server.conftest import Running, running
from tests.soon_compiled import few_programs

QUERY = "Once upon"
DOCUMENTS = ["a time there were", "three", "tokens come out", "Once upon a time"]


@pytest.fixture(scope="module")
def embedder(llama: Path) -> Iterator[Running]:
    with few_programs():
        engine = Engine(EngineConfig(str(llama), convert="embed", **SIZES))
    with running(engine, served_model_name=["tiny"]) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """Return a server of a head that reads pairs, and its checkpoint."""
    path = tmp_path_factory.mktemp("ranker")
    write_classifier(path, "llama", num_labels=1)
    tiny_tokenizers.write(path, tiny_tokenizers.byte_level(VOCAB_SIZE), bos_token="<s>", eos_token="</s>")
    with few_programs():
        engine = Engine(EngineConfig(str(path), **SIZES))
    with running(engine, served_model_name=["tiny"]) as server:
        yield server, path


@pytest.fixture(scope="module")
def cosines(llama: Path) -> np.ndarray:
    """Return the cosines of the embeddings of the documents and the query."""
    model = transformers.AutoModel.from_pretrained(llama).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(llama)
    with torch.no_grad():
        hidden = [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in (QUERY, *DOCUMENTS)
        ]
    vectors = torch.nn.functional.normalize(torch.stack(hidden), dim=-1)
    return np.asarray((vectors[1:] @ vectors[0]).numpy())


def logits(path: Path, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """Return what transformers' head says of pairs."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    with torch.no_grad():
        return torch.stack([model(**tokenizer(*pair, return_tensors="pt")).logits[0, 0] for pair in pairs])


def post(server: Running, path: str, **body: Any) -> Any:
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]
)
def test_scores_of_embeddings(embedder: Running, cosines: np.ndarray, names: tuple[str, str]) -> None:
    reply = post(embedder, "/score", **{names[0]: QUERY, names[1]: DOCUMENTS})
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2, 3]
    assert {entry["object"] for entry in reply["data"]} == {"score"}
    np.testing.assert_allclose([entry["score"] for entry in reply["data"]], cosines, rtol=0, atol=1e-5)
    one_by_one = post(embedder, "/v1/score", **{names[0]: [QUERY] * 4, names[1]: DOCUMENTS})
    np.testing.assert_allclose([entry["score"] for entry in one_by_one["data"]], cosines, rtol=0, atol=1e-5)
    assert one_by_one["usage"]["prompt_tokens"] > reply["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_of_embeddings(embedder: Running, cosines: np.ndarray, path: str) -> None:
    order = np.argsort(-cosines, kind="stable").tolist()
    reply = post(embedder, path, model="tiny", query=QUERY, documents=DOCUMENTS, top_n=3)
    assert [result["index"] for result in reply["results"]] == order[:3]
    found = [result["relevance_score"] for result in reply["results"]]
    np.testing.assert_allclose(found, cosines[order[:3]], rtol=0, atol=1e-5)
    assert [result["document"]["text"] for result in reply["results"]] == [DOCUMENTS[i] for i in order[:3]]
    assert reply["usage"]["total_tokens"] == reply["meta"]["tokens"]["input_tokens"] > 0
    objects = [{"text": text} for text in DOCUMENTS]  # Jina's
    bare = post(embedder, path, query=QUERY, documents=objects, return_documents=False)
    assert [result["index"] for result in bare["results"]] == order
    assert not any("document" in result for result in bare["results"])


def test_ranks_of_a_head(ranker: tuple[Running, Path]) -> None:
    server, path = ranker
    expected = logits(path, [(QUERY, text) for text in DOCUMENTS])
    reply = post(server, "/rerank", query=QUERY, documents=DOCUMENTS)
    by_index = {result["index"]: result["relevance_score"] for result in reply["results"]}
    np.testing.assert_allclose([by_index[i] for i in range(4)], torch.sigmoid(expected).numpy(), rtol=0, atol=1e-5)
    assert list(by_index) == np.argsort(-expected.numpy(), kind="stable").tolist()
    raw = post(server, "/score", queries=QUERY, documents=DOCUMENTS, use_activation=False)
    np.testing.assert_allclose([entry["score"] for entry in raw["data"]], expected.numpy(), rtol=0, atol=1e-5)
    with few_programs(), LLM(str(path), **SIZES) as llm:
        offline = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    np.testing.assert_allclose(offline, torch.sigmoid(expected).numpy(), rtol=0, atol=1e-5)


def test_long_documents_are_shortened(ranker: tuple[Running, Path]) -> None:
    server, path = ranker
    long = "a time " * 40
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    begun = tokenizer.decode(tokenizer.encode(long, add_special_tokens=False)[:5])
    reply = post(server, "/score", queries=QUERY, documents=long, max_tokens_per_doc=5)
    expected = torch.sigmoid(logits(path, [(QUERY, begun)]))
    assert reply["data"][0]["score"] == pytest.approx(float(expected[0]), abs=1e-5)
    cut = post(server, "/score", queries=QUERY, documents=long, truncate_prompt_tokens=20)
    assert cut["usage"]["prompt_tokens"] <= 20
    post(server, "/score", queries=QUERY, documents=long, truncate_prompt_tokens=-1)
    refused = server.client.post("/score", json={"queries": QUERY, "documents": long})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "Please reduce the length of the input prompt" in refused.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"queries": "a"}, "queries"),
        ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
        ("/score", {"queries": "a", "documents": []}, "documents"),
        ("/score", {"queries": "a", "documents": [[5, 6]]}, "documents"),
        ("/rerank", {"query": ["a", "b"], "documents": ["a", "b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -5}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["a"], "model": "other"}, "model"),
    ],
)
def test_errors_of_scores(embedder: Running, path: str, body: dict[str, Any], param: str) -> None:
    reply = embedder.client.post(path, json=body)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == param


def test_a_model_that_generates_scores_nothing(server: Running) -> None:
    reply = server.client.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "model_does_not_pool")


def test_pairs_are_counted_before_they_are_encoded() -> None:
    body = {"query": "a", "documents": ["b"] * 3}
    context = BodyContext("m", pooler=Pooler(num_labels=1), max_model_len=8, max_prompts=2)
    with pytest.raises(RequestError, match="documents must be at most 2 texts, got 3"):
        parse_scoring("/rerank", body, context)

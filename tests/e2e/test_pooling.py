"""Embeddings, labels and scores, against transformers in float32."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import transformers
from numpy.typing import NDArray

from jaxserve import LLM, weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.pooling_params import Activation, PoolingKind, PoolingParams
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.errors import ConfigError, RequestError
from jaxserve.models import registry
from tests.checkpoints import FAMILIES, build_config, randomize, write_checkpoint
from tests.e2e.sizes import SIZES, VOCAB_SIZE
from tests.e2e.workloads import tokens
from tests.oracles import torch
from tests.parameters import some_by_default
from tests.soon_compiled import few_programs

TOLERANCE = 1e-5
PROMPTS = [tokens(n, n) for n in (50, 3, 1, 33, 64)]  # chunks have 16 tokens, and a step 4 rows
LABELS = {"num_labels": 3, "pad_token_id": 0}

Start = Callable[..., LLM]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3 decoder without its head, as Qwen3-Embedding's files are."""
    path = tmp_path_factory.mktemp("qwen3")
    transformers.AutoModelForCausalLM.from_pretrained(
        _with_tokenizer(path, write_checkpoint(path, "qwen3", vocab_size=VOCAB_SIZE))
    ).model.save_pretrained(path)
    return path


def _with_tokenizer(path: Path, _model: object) -> Path:
    return tiny_tokenizers.write(path, tiny_tokenizers.byte_level(VOCAB_SIZE), bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def decoder(embedder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModel.from_pretrained(embedder).eval()


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Start an engine that pools, or reuse the one with the same options."""
    engines: dict[str, LLM] = {}

    def start(path: Path, **options: Any) -> LLM:
        key = json.dumps([str(path), options])
        if key not in engines:
            with few_programs():
                engines[key] = LLM.over(DrivenEngine(EngineConfig(str(path), **SIZES | options)))
        engines[key].reset_prefix_cache()
        return engines[key]

    yield start
    for llm in engines.values():
        assert llm.engine.occupancy.num_pages_used == 0
        assert llm.engine.stats.num_sampled_tokens == 0, "what the device samples of prompts alone is not counted"
        llm.engine.check_integrity()
        llm.close()


def hidden_states(decoder: transformers.PreTrainedModel, prompt: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        return decoder(torch.tensor([prompt])).last_hidden_state[0].numpy()


def pooled(hidden: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    return {"LAST": hidden[-1], "MEAN": hidden.mean(0), "CLS": hidden[0]}[kind]


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_embeddings_match_transformers(
    start: Start, embedder: Path, decoder: transformers.PreTrainedModel, kind: str
) -> None:
    name = "normalize" if kind == "LAST" else "use_activation"
    llm = start(embedder, pooler_config={"pooling_type": kind, name: False})
    wanted = [pooled(hidden_states(decoder, prompt), kind) for prompt in PROMPTS]
    for _ in range(2):  # the second time, some of their pages are cached
        outputs = llm.embed([*PROMPTS, *PROMPTS[:2]], use_tqdm=False)
        for output, prompt, vector in zip(outputs, [*PROMPTS, *PROMPTS[:2]], [*wanted, *wanted[:2]], strict=True):
            np.testing.assert_allclose(output.outputs.embedding, vector, rtol=0, atol=TOLERANCE)
            assert output.prompt_token_ids == prompt
    longest, again = (llm.embed(PROMPTS[0], use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == (48 if kind == "LAST" else 0)
    np.testing.assert_allclose(again.outputs.embedding, longest.outputs.embedding, rtol=0, atol=TOLERANCE)


def test_prompts_give_way_to_others_and_keep_their_vectors(
    start: Start, embedder: Path, decoder: transformers.PreTrainedModel
) -> None:
    options = {"scheduling_policy": "priority", "max_num_partial_prefills": 4}
    pooling = {"pooling_type": "MEAN", "normalize": False}  # programs are those of the test above
    engine = start(embedder, pooler_config=pooling, **options).engine
    prompts = [tokens(40, f"long {n}") for n in range(8)]
    outputs = {}
    for number, prompt in enumerate(prompts):
        outputs[number] = engine.add_request(str(number), prompt, priority=9 - number)
        engine.step()
        engine.step()
    while engine.has_unfinished():
        engine.step()
    assert engine.stats.num_preemptions > 0
    for number, prompt in enumerate(prompts):
        wanted = hidden_states(decoder, prompt).mean(0)
        np.testing.assert_allclose(outputs[number].pooled, wanted, rtol=0, atol=TOLERANCE)


def test_parameters_of_requests(start: Start, embedder: Path, decoder: transformers.PreTrainedModel) -> None:
    llm = start(embedder)
    last = hidden_states(decoder, PROMPTS[0])[-1]
    params = [
        PoolingParams(),
        PoolingParams(dimensions=8),
        PoolingParams(dimensions=8, normalize=False),
        PoolingParams(dimensions=8, use_activation=False),
        PoolingParams(truncate_prompt_tokens=7),
        PoolingParams(truncate_prompt_tokens=7, truncation_side="left"),
    ]
    outputs = llm.encode([PROMPTS[0]] * len(params), params, use_tqdm=False)
    wanted = [
        last / np.linalg.norm(last),
        last[:8] / np.linalg.norm(last[:8]),
        last[:8],
        last[:8],
        (cut := hidden_states(decoder, PROMPTS[0][:7])[-1]) / np.linalg.norm(cut),
        (cut := hidden_states(decoder, PROMPTS[0][-7:])[-1]) / np.linalg.norm(cut),
    ]
    for output, vector in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(output.outputs.data, vector, rtol=0, atol=TOLERANCE)


def test_score_is_the_cosine(start: Start, embedder: Path) -> None:
    llm = start(embedder)
    texts = ["a cat", "a dog", "stone"]
    one, *others = (np.array(o.outputs.embedding) for o in llm.embed([texts[0], *texts], use_tqdm=False))
    scores = [o.outputs.score for o in llm.score(texts[0], texts, use_tqdm=False)]
    np.testing.assert_allclose(scores, [one @ other for other in others], rtol=0, atol=TOLERANCE)
    assert scores[0] == pytest.approx(1, abs=TOLERANCE)
    with pytest.raises(RequestError, match=r"as many as in data_2"):
        llm.score(texts[:2], texts)


def write_classifier(path: Path, family: str, **overrides: Any) -> transformers.PreTrainedModel:
    config = build_config(family, vocab_size=VOCAB_SIZE, **LABELS | overrides)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("family", some_by_default(["llama", "gpt2", "gemma2", "qwen3", "mixtral"], "llama", "gpt2"))
def test_labels_match_transformers(tmp_path: Path, family: str) -> None:
    model = write_classifier(tmp_path, family)
    with few_programs(), closing(LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES)) as llm:
        outputs = [llm.classify(PROMPTS, use_tqdm=False), llm.reward(PROMPTS, use_tqdm=False)]
    for prompt, probs, rewards in zip(PROMPTS, *outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        np.testing.assert_allclose(probs.outputs.probs, logits.softmax(-1).numpy(), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(rewards.outputs.data, logits.numpy(), rtol=0, atol=TOLERANCE)


def test_a_head_of_one_label_scores_pairs(tmp_path: Path) -> None:
    model = write_classifier(tmp_path, "llama", num_labels=1)
    _with_tokenizer(tmp_path, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["what is it", "a cat", "a dog"]
    with few_programs(), closing(LLM(str(tmp_path), **SIZES)) as llm:
        scores = [output.outputs.score for output in llm.score(texts[0], texts[1:], use_tqdm=False)]
    with torch.no_grad():
        logits = [model(**tokenizer(texts[0], text, return_tensors="pt")).logits[0, 0] for text in texts[1:]]
    np.testing.assert_allclose(scores, torch.sigmoid(torch.stack(logits)).numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "gpt_neo", "qwen3_moe", "phi", "gpt_neox"])
def test_classifiers_of_all_families_are_read(tmp_path: Path, family: str) -> None:
    write_classifier(tmp_path, family)
    weights.check(tmp_path, registry.param_specs(build_arch(EngineConfig(str(tmp_path)))))


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_of_all_families_are_read(tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE)
    weights.check(tmp_path, registry.param_specs(build_arch(EngineConfig(str(tmp_path), convert="embed"))))
    model.base_model.save_pretrained(tmp_path / "bare")
    weights.check(tmp_path / "bare", registry.param_specs(build_arch(EngineConfig(str(tmp_path / "bare")))))


def test_a_head_that_only_pooling_may_leave_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt2")
    specs = registry.param_specs(build_arch(EngineConfig(str(tmp_path))))
    tensors = {n: np.zeros(s, np.float32) for row in specs for n, s in weights.rows.hf_shapes(row).items()}
    with pytest.raises(weights.CheckpointError, match=r"1 unexpected: lm_head.bias"):
        weights.assemble(tensors | {"lm_head.bias": np.zeros(131, np.float32)}, specs)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"num_labels": 1}, Activation.SIGMOID),
        ({"problem_type": "regression"}, Activation.IDENTITY),
        ({"problem_type": "single_label_classification"}, Activation.SOFTMAX),
        ({"problem_type": "multi_label_classification"}, Activation.SIGMOID),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, Activation.IDENTITY),
    ],
)
def test_activations(tmp_path: Path, fields: dict[str, Any], activation: Activation) -> None:
    config = build_config("llama", **LABELS | fields).to_dict()
    config["architectures"] = ["LlamaForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    pooler = build_arch(EngineConfig(str(tmp_path))).pooler
    assert pooler is not None
    assert (pooler.activation, pooler.num_labels) == (activation, config.get("num_labels") or len(config["id2label"]))
    logits = np.array([-200.0, 0.5, 3.0], np.float32)
    oracle = {Activation.SIGMOID: torch.sigmoid, Activation.SOFTMAX: lambda x: x.softmax(-1)}.get(
        activation, lambda x: x
    )
    active = oracle(torch.tensor(logits)).numpy()
    for default in (None, False):
        options = {"pooler_config": {"use_activation": default}}
        pooler = build_arch(EngineConfig(str(tmp_path), **options)).pooler
        assert pooler is not None
        for own in (None, True, False):
            wanted = logits if (default is False and own is None) or own is False else active
            found = pooler.finish(logits, PoolingParams(use_activation=own))
            np.testing.assert_allclose(found, wanted, atol=1e-6)


class TestSentenceTransformers:
    """Files beside a checkpoint say how it pools."""

    @pytest.fixture
    def files(self, embedder: Path, tmp_path: Path) -> Callable[..., EngineConfig]:
        def write(pooling: dict[str, Any], *modules: str) -> EngineConfig:
            (tmp_path / "1_Pooling").mkdir()
            (tmp_path / "config.json").write_text((embedder / "config.json").read_text())
            (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
            entries = [
                {
                    "idx": index,
                    "path": f"{index}_{name}" if index else "",
                    "type": f"sentence_transformers.models.{name}",
                }
                for index, name in enumerate(["Transformer", "Pooling", *modules])
            ]
            (tmp_path / "modules.json").write_text(json.dumps(entries))
            return EngineConfig(str(tmp_path))

        return write

    @pytest.mark.parametrize(("field", "kind"), [("lasttoken", "LAST"), ("mean_tokens", "MEAN"), ("cls_token", "CLS")])
    def test_modes(self, files: Callable[..., EngineConfig], field: str, kind: str) -> None:
        modes = dict.fromkeys(["pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"], False)
        config = files({"word_embedding_dimension": 64, **modes, f"pooling_mode_{field}": True}, "Normalize")
        pooler = build_arch(config).pooler
        assert pooler is not None
        assert (pooler.kind, pooler.normalize, pooler.num_labels) == (PoolingKind(kind), True, 0)

    def test_others_are_refused(self, files: Callable[..., EngineConfig]) -> None:
        with pytest.raises(ConfigError, match=r"modules.json must have .*'mean\+max' and \['Dense'\]"):
            build_arch(files({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "Dense"))


@pytest.mark.usefixtures("no_type_checks")
def test_each_kind_of_engine_refuses_the_other_requests(start: Start, embedder: Path, llm: LLM) -> None:
    pooling = start(embedder)
    with pytest.raises(RequestError, match=r"this engine pools .embed., and text was asked for; use its embed, or"):
        pooling.generate("a")
    with pytest.raises(RequestError, match=r"this engine generates text, .* start one with runner='pooling'"):
        llm.embed("a")
    with pytest.raises(RequestError, match=r"task must be 'embed' with this model, got 'classify'"):
        pooling.classify("a")
    with pytest.raises(RequestError, match="vectors and labels per token are not returned"):
        pooling.encode("a", pooling_task="token_embed")
    with pytest.raises(RequestError, match=r"normalize and use_activation must be equal for embeddings, got False and"):
        pooling.encode("a", PoolingParams(use_activation=True, normalize=False))
    with pytest.raises(RequestError, match=r"dimensions must be at most 64 with this model, got 65"):
        pooling.encode("a", PoolingParams(dimensions=65))
    with pytest.raises(RequestError, match=r"maximum context length is 64 tokens.* has 65 input tokens"):
        pooling.embed([tokens(65, 0)])
    with pytest.raises(RequestError, match=r"task of pooling_params must be None or .*'embed', got 'classify'"):
        pooling.embed("a", pooling_params=PoolingParams(task="classify"))
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens of pooling_params must be None or .* 2, got 3"):
        pooling.embed("a", pooling_params=PoolingParams(truncate_prompt_tokens=3), truncate_prompt_tokens=2)
    with pytest.raises(RequestError, match=r"pooling_params must be PoolingParams"):
        pooling.encode("a", SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooler_config": {"pooling_type": "STEP"}}, "pooling_type must be one of .*'MEAN'.*, got 'STEP'"),
        (
            {"pooler_config": '{"step_tag_id": 1}'},
            r"unsupported options of pooler_config \['step_tag_id'\]; supported are .*'pooling_type'",
        ),
        ({"runner": "generate", "convert": "embed"}, "needs runner='pooling'"),
        ({"runner": "draft"}, "runner must be one of"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("end", "option", "message"),
    [
        ("ForCausalLM", {"pooling_type": "MEAN"}, "pooler_config needs a model that pools, got one that generates"),
        ("Model", {"use_activation": False, "normalize": True}, "normalize and use_activation must be equal"),
        (
            "ForSequenceClassification",
            {"normalize": True},
            "normalize of pooler_config must be absent for .*'classify'",
        ),
    ],
)
def test_options_that_change_nothing_are_refused(
    tmp_path: Path, end: str, option: dict[str, Any], message: str
) -> None:
    config = build_config("llama").to_dict() | {"architectures": [f"Llama{end}"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        build_arch(EngineConfig(str(tmp_path), pooler_config=option))


def test_models_that_attend_to_later_tokens_are_refused(tmp_path: Path) -> None:
    config = build_config("gemma3").to_dict() | {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"use_bidirectional_attention must not be True"):
        build_arch(EngineConfig(str(tmp_path)))

"""EAGLE-3 and MTP heads draft what their definitions in torch draft."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import draft_layers
import jax
import numpy as np
import pytest
import transformers
from draft_layers import Head
from safetensors.numpy import load_file, save_file

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from jaxserve.models.params import matrix_transform
from jaxserve.models.registry import from_hf_config
from jaxserve.spec_decode.head_files import load_draft_layer, load_medusa
from tests.e2e.sizes import EOS, VOCAB_SIZE
from tests.e2e.workloads import generate, tokens
from tests.oracles import torch
from tests.parameters import some_by_default

Start = Callable[..., DrivenEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LIKELY = range(40, 46)  # the model's tokens are among these, so that some drafts are right


@pytest.fixture(scope="module")
def model(llama: Path) -> transformers.LlamaForCausalLM:
    """Return the model of `llama`, whose logits of tokens that are not LIKELY are small."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_pretrained(llama, tie_word_embeddings=False).eval()


@pytest.fixture(scope="module")
def target(model: transformers.LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write that model."""
    make_others_unlikely(model)
    path = tmp_path_factory.mktemp("target")
    model.config.tie_word_embeddings = False
    model.save_pretrained(path)
    return path


def make_others_unlikely(model: transformers.PreTrainedModel) -> None:
    """Make the logits of tokens that are not LIKELY small."""
    with torch.no_grad():
        unlikely = torch.ones(model.config.vocab_size, dtype=torch.bool)
        unlikely[list(LIKELY)] = False
        model.lm_head.weight[unlikely] *= 0.01


HEADS = {
    "eagle3": {"feature_layers": (0, 1, 2)},
    "eagle3 of speculators": {
        "feature_layers": (2, 1),
        "layout": "speculators",
        "norms_residual": True,
        "norms_output": True,
    },
    "eagle3 of few tokens": {"feature_layers": (1,), "token_ids": (3, *LIKELY, 200)},
    "mtp": {},
}


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("kind", some_by_default(HEADS, "eagle3"))
def test_accepted_tokens_equal_torchs_drafts(
    start: Start, model: transformers.LlamaForCausalLM, target: Path, tmp_path: Path, kind: str, num_tokens: int
) -> None:
    method = kind.split(maxsplit=1)[0]
    write = draft_layers.write_eagle3 if method == "eagle3" else draft_layers.write_mtp
    head = write(tmp_path, model, **HEADS[kind])
    heads = SpeculationConfig(method, str(tmp_path), num_speculative_tokens=num_tokens, adaptive=False)
    assert_accepted(start, target, head, heads)


@pytest.mark.parametrize("family", some_by_default(checkpoints.LATENT))
def test_an_mtp_layer_after_the_models_layers_drafts(start: Start, tmp_path: Path, family: str) -> None:
    """MTP layers of models that attend over latents: in the same checkpoint, with latents and experts of their own."""
    model = checkpoints.build_model(family, vocab_size=VOCAB_SIZE, tie_word_embeddings=False, eos_token_id=EOS)
    make_others_unlikely(model)
    model.save_pretrained(tmp_path)
    head = draft_layers.add_mtp(tmp_path, model)
    layer = SpeculationConfig("mtp", num_speculative_tokens=3, adaptive=False)
    assert_accepted(start, tmp_path, head, layer)
    # Prefixes that are cached, rows that are preempted.
    prompts = [tokens(20, n) for n in range(4)]
    engine = start(model=str(tmp_path), speculative_config=layer)
    before = replace(engine.stats)
    for _ in range(2):
        for output in generate(engine, prompts, replace(GREEDY, max_tokens=20)):
            assert_greedy(model, output, 20)
    stats = engine.stats.since(before)
    assert stats.num_preemptions > 0 < stats.num_accepted_tokens
    assert stats.num_cached_tokens > 0
    engine.check_integrity()


def assert_accepted(start: Start, target: Path, head: Head, heads: SpeculationConfig) -> None:
    """Check that drafts are those of torch: as many as follow from its drafts are accepted."""
    engine = start(model=str(target), speculative_config=heads, step_ahead=False)
    num_tokens = heads.max_drafts
    num_accepted = num_rejected = 0
    for index in range(5):
        prompt = tokens(5 + 5 * index, f"layer {index}")  # computed in several chunks
        before = replace(engine.stats)
        [output] = generate(engine, [prompt], replace(GREEDY, max_tokens=30))
        assert_greedy(head.model, output, 30)
        stats = engine.stats.since(before)
        accepted, drafted = simulated(head, prompt, output.outputs[0].token_ids, num_tokens)
        assert (stats.num_accepted_tokens, stats.num_drafted_tokens) == (accepted, drafted)
        num_accepted, num_rejected = num_accepted + accepted, num_rejected + drafted - accepted
    assert num_accepted > 5 < num_rejected


def assert_greedy(model: transformers.PreTrainedModel, output: RequestOutput, num_tokens: int) -> None:
    """Check that there are so many tokens, each the most likely one of torch's model behind those before it."""
    prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
    logits = checkpoints.reference_logits(model, np.array(prompt + ids))
    assert ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len(ids) == num_tokens


def simulated(head: Head, prompt: list[int], output: list[int], num_tokens: int) -> tuple[int, int]:
    """Return how many tokens a head drafts in the rounds of a request, and how many of them are right."""
    ids = [*prompt, *output]
    features, last = head.features(ids), len(prompt)  # place of the last known token
    num_accepted = num_drafted = 0
    while last < len(ids) - 1:
        most = min(num_tokens, len(ids) - last - 2)
        drafts = head.draft(ids[: last + 1], features, most)
        right = next((n for n in range(most) if drafts[n] != ids[last + 1 + n]), most)
        num_accepted, num_drafted, last = num_accepted + right, num_drafted + most, last + right + 1
    return num_accepted, num_drafted


@pytest.mark.parametrize("layout", ["speculators", "mimo"])
def test_mtp_heads_are_the_same_in_every_layout(
    model: transformers.LlamaForCausalLM, tmp_path: Path, layout: str
) -> None:
    arch = from_hf_config(model.config.to_dict())
    params = []
    for name in ("deepseek", layout):
        torch.manual_seed(1)
        draft_layers.write_mtp(tmp_path / name, model, name)
        params.append(load_draft_layer(tmp_path / name, "mtp", arch, np.float32, matrix_transform)[0])
    jax.tree.map(np.testing.assert_array_equal, *params)


def test_heads_that_do_not_fit_are_refused(model: transformers.LlamaForCausalLM, tmp_path: Path) -> None:
    arch = from_hf_config(model.config.to_dict())
    draft_layers.write_eagle3(tmp_path, model, (0, 1, 9))
    with pytest.raises(ConfigError, match=r"eagle_aux_hidden_state_layer_ids .* distinct numbers in \[0, 2\]"):
        load_draft_layer(tmp_path, "eagle3", arch, np.float32, matrix_transform)
    draft_layers.write_eagle3(tmp_path, model, (0, 1))
    with pytest.raises(ConfigError, match=r"must fit the model: (?s:.*)missing: embedding_norm, proj"):
        load_draft_layer(tmp_path, "mtp", arch, np.float32, matrix_transform)
    wide = replace(arch, hidden_size=2 * arch.hidden_size)
    with pytest.raises(ConfigError, match="must be as wide as the model"):
        load_draft_layer(tmp_path, "eagle3", wide, np.float32, matrix_transform)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"eagle_aux_hidden_state_layer_ids": 1}, "eagle_aux_hidden_state_layer_ids must be a list or null"),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": [1]}, "eagle_config must be an object or null"),
        ({"transformer_layer_config": "x"}, "transformer_layer_config must be an object or null"),
    ],
)
def test_odd_fields_of_a_head_are_named(
    model: transformers.LlamaForCausalLM, tmp_path: Path, fields: dict[str, Any], match: str
) -> None:
    arch = from_hf_config(model.config.to_dict())
    draft_layers.write_eagle3(tmp_path, model, (0, 1))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": None}))
    load_draft_layer(tmp_path, "eagle3", arch, np.float32, matrix_transform)
    file.write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=match):
        load_draft_layer(tmp_path, "eagle3", arch, np.float32, matrix_transform)


def test_damaged_tensors_of_a_head_are_refused(model: transformers.LlamaForCausalLM, tmp_path: Path) -> None:
    arch = from_hf_config(model.config.to_dict())
    draft_layers.write_eagle3(tmp_path, model, (0, 1))
    [file] = tmp_path.glob("*.safetensors")
    tensors, whole = load_file(file), file.read_bytes()

    def refuses(match: str, **changed: np.ndarray) -> None:
        save_file(tensors | changed, file)
        with pytest.raises(ConfigError, match=match):
            load_draft_layer(tmp_path, "eagle3", arch, np.float32, matrix_transform)

    V, D = arch.vocab_size, arch.hidden_size
    narrow = np.zeros((V // 2, D), np.float32)
    refuses("must fit the model", **{"lm_head.weight": narrow})
    offsets = np.zeros(V // 4, np.int64)
    refuses("must fit the model", **{"lm_head.weight": narrow}, d2t=offsets)
    refuses("d2t as a vector", **{"lm_head.weight": narrow}, d2t=offsets[:, None])
    file.write_bytes(whole[:-8])
    with pytest.raises(ConfigError, match="must be whole"):
        load_draft_layer(tmp_path, "eagle3", arch, np.float32, matrix_transform)


def test_medusa_heads_count_from_0(model: transformers.LlamaForCausalLM, tmp_path: Path) -> None:
    arch = from_hf_config(model.config.to_dict())
    save_file({"1.0.linear.weight": np.zeros((arch.hidden_size,) * 2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="must count from 0"):
        load_medusa(tmp_path, arch, np.float32)

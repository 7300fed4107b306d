"""Draft heads learn what the model predicts, in the form in which the engine runs them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import draft_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.models.params import Params, matrix_transform
from jaxserve.models.registry import from_hf_config, param_specs
from jaxserve.spec_decode.head_files import load_draft_layer, load_medusa
from jaxserve.weights import save
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import generate
from tests.oracles import torch

KINDS = ("medusa", "eagle3")
CYCLE = 7


@pytest.fixture(scope="module")
def cycles() -> list[NDArray[np.int32]]:
    """Return documents that count in a cycle."""
    rng = np.random.default_rng(0)
    return [np.arange(n, dtype=np.int32) % CYCLE for n in rng.integers(5, 90, size=30)]


@pytest.fixture(scope="module")
def target(cycles: Sequence[NDArray[np.int32]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model that has learnt to count."""
    from train_default import MeanNats, Recipe, as_params, init_tensors
    from training.loop import train

    recipe = Recipe(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=32, steps=60, head_dim=8,
        vocab_size=32, batch_size=64, microbatch_size=32, seq_len=16, long_seq_len=32, warmup_steps=5,
        decay_fraction=0.1, long_fraction=0.0,
    )  # fmt: skip
    arch = from_hf_config(recipe.hf_config())
    tensors = train(recipe, cycles, init_tensors(param_specs(arch), 0), MeanNats(arch, None), None)
    path = tmp_path_factory.mktemp("counting")
    save(path, param_specs(arch), as_params(tensors, arch), recipe.hf_config())
    return path


@pytest.mark.full  # tests/e2e/test_embedded_heads.py has trained heads by default
@pytest.mark.parametrize("kind", KINDS)
def test_trained_heads_draft_the_models_continuation(
    cycles: Sequence[NDArray[np.int32]], target: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from train_medusa import shipped_heads
    from training import heads as files
    from training.dense_model import load_model
    from training.loop import Schedule, train

    params, arch = load_model(target)
    heads = shipped_heads(kind, arch)
    schedule = Schedule(
        steps=100, batch_size=64, microbatch_size=64, seq_len=32, warmup_steps=5, decay_fraction=0.3, long_fraction=0.0
    )
    tensors = train(schedule, cycles, heads.init(0), files.HeadLoss(heads), params)
    nats = [json.loads(line)["nats_per_token"] for line in capsys.readouterr().out.splitlines()]
    assert nats[-1] < 0.7 * nats[0]
    files.save(tmp_path, heads, tensors)

    options: dict[str, Any] = {"model": str(target), "skip_tokenizer_init": True, **SIZES, "max_model_len": 32}
    drafting = SpeculationConfig(kind, str(tmp_path), num_speculative_tokens=3, adaptive=False)
    engine = DrivenEngine(EngineConfig(speculative_config=drafting, **options))
    prompts = [[3, 4, 5, 6, 0], [1, 2]]
    for output, prompt in zip(
        generate(engine, prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)), prompts, strict=True
    ):
        assert output.outputs[0].token_ids == [(prompt[-1] + n) % CYCLE for n in range(1, 21)]
    assert engine.stats.num_accepted_tokens > 0.5 * engine.stats.num_drafted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_the_tensors_and_the_layer_config(target: Path, kind: str, tmp_path: Path) -> None:
    from train_medusa import shipped_heads
    from training import heads as files
    from training.dense_model import load_model

    _, arch = load_model(target)
    heads = shipped_heads(kind, arch)
    rng = np.random.default_rng(0)
    tensors = {
        name: jnp.asarray(rng.integers(-8, 9, x.shape) / 8, jnp.float32)  # exact in bfloat16
        for name, x in jax.eval_shape(partial(heads.init, 0)).items()
    }
    files.save(tmp_path, heads, tensors)
    if isinstance(heads, files.MedusaHeads):
        params: Params = load_medusa(tmp_path, arch, jnp.float32)
    else:
        params, head = load_draft_layer(tmp_path, "eagle3", arch, jnp.float32, matrix_transform)
        assert replace(head, arch=heads.head.arch) == heads.head
        assert replace(head.arch, architecture="", eos_ids=frozenset()) == replace(
            heads.head.arch, architecture="", eos_ids=frozenset()
        )
    jax.tree.map(np.testing.assert_array_equal, params, heads.params(tensors))


def test_training_steps_of_a_layer_equal_drafting(tmp_path: Path) -> None:
    """The layer as torch defines it drafts what training has it predict where the text is what it drafted."""
    from training.dense_model import load_model
    from training.heads import Eagle3Layer

    sizes = {"num_hidden_layers": 3, "head_dim": 8}
    model = checkpoints.write_checkpoint(tmp_path / "model", "llama", **sizes)
    params, arch = load_model(tmp_path / "model")
    torch.manual_seed(0)
    head = draft_layers.write_eagle3(tmp_path / "head", model, (1, 3))
    layer = Eagle3Layer(arch, (1, 3), ffn_size=arch.layers[0].mlp.ffn_size, num_steps=3)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    tensors = {name: jnp.asarray(stored[layer.published(name)]) for name in jax.eval_shape(partial(layer.init, 0))}
    predict = jax.jit(partial(layer.predict, tensors, params))

    rng = np.random.default_rng(0)
    ids = rng.integers(3, arch.vocab_size, 23).tolist()
    for place in (0, 4, 12):
        known = ids[: place + 2]
        drafts = head.draft(known, head.features(known), 3)
        text = [*known, *drafts, *ids][: len(ids)]
        predictions = predict(jnp.asarray([text]))
        assert [int(drafted[0, place // 4].argmax()) for drafted, _ in predictions] == drafts
        with torch.no_grad():
            goals = model(torch.tensor([text])).logits[0].numpy()
        for step, (_, goal) in enumerate(predictions):
            np.testing.assert_allclose(goal[0, place // 4], goals[place + 1 + step], atol=1e-4)

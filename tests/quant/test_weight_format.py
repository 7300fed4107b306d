"""A format that only tests know, from its line in the registry to logits and plans."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams, weights
from jaxserve.api import config
from jaxserve.api.config import WEIGHT_FORMATS
from jaxserve.layers.weight_formats import packed, weight_format
from jaxserve.models import registry
from jaxserve.models.params import device_bytes, matrix_transform, step_bytes
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.program import abstract_params
from jaxserve.tools.planner.targets import parse_target
from tests.checkpoints import write_checkpoint
from tests.e2e.sizes import SIZES
from tests.models.test_parity import run
from tests.parameters import some_by_default
from tests.quant.planes import Planes
from tests.soon_compiled import few_programs

FAMILIES = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"tie_word_embeddings": True}}


@pytest.fixture(autouse=True)
def planes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHT_FORMATS, "planes", "tests.quant.planes")
    schema = config._SCHEMA
    types = {"quantization": config.quantization_type()}
    entries = [(name, types.get(name, each), skipped) for name, each, skipped in schema._entries]
    monkeypatch.setattr(schema, "_entries", entries)


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, request.param, dtype="bfloat16", **FAMILIES[request.param])
    return tmp_path


def is_planes(x: object) -> bool:
    return isinstance(x, Planes)


def test_logits_are_those_of_the_weights_it_encodes(checkpoint: Path) -> None:
    arch = registry.from_hf_config(weights.read_config(checkpoint))
    specs = registry.param_specs(arch)
    trees = [
        weights.load(checkpoint, specs, jnp.float32, transform=matrix_transform(specs, weight_format(name)))
        for name in (None, "planes")
    ]
    ids = jnp.arange(3, 30, dtype=jnp.int32)
    plain, found = (np.asarray(run(params, arch, ids)[0]) for params in trees)
    np.testing.assert_array_equal(found, plain)
    stored = {spec.path[-1] for spec in specs if is_planes(weights.rows.leaf_at(trees[1], spec.path))}
    assert stored == {spec.path[-1] for spec in specs if spec.is_matrix and spec.path[-1] != "o_proj"}


@pytest.mark.parametrize("checkpoint", some_by_default(FAMILIES, "llama"), indirect=True)
@pytest.mark.long
def test_llm_serves_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader, steps and step statistics; plain weights are not packed, so that XLA multiplies the same matrices."""
    monkeypatch.setattr(packed, "unsupported", lambda *_: "compared with products by XLA")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 20)]
    found = []
    for quantization in (None, "planes"):
        with few_programs():
            llm = LLM(str(checkpoint), skip_tokenizer_init=True, quantization=quantization, **SIZES)
        with llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
            logprobs = [{i: x.logprob for i, x in step.items()} for o in outputs for step in o.logprobs or []]
            found.append(([o.token_ids for o in outputs], logprobs, step_bytes(llm.params)))
            is_stored = [is_planes(x) for x in jax.tree.leaves(llm.params, is_leaf=is_planes)]
            assert any(is_stored) == (quantization is not None)
    (plain_ids, plain_logprobs, plain_bytes), (ids, logprobs, num_bytes) = found
    assert (ids, logprobs) == (plain_ids, plain_logprobs)
    assert 0.5 < num_bytes / plain_bytes < 0.6


@pytest.mark.parametrize("num_devices", [1, 2])
def test_plans_count_the_bytes_that_are_loaded(checkpoint: Path, num_devices: int) -> None:
    arch = registry.from_hf_config(weights.read_config(checkpoint))
    specs = registry.param_specs(arch)
    transform = matrix_transform(specs, weight_format("planes"))
    loaded = weights.load(checkpoint, specs, jnp.float32, transform=transform)
    planned = abstract_params(arch, jnp.dtype("float32"), "planes", num_devices)
    assert jax.tree.structure(planned) == jax.tree.structure(loaded)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(planned)]
    held = device_bytes(loaded)
    assert sum(sizes) == held if num_devices == 1 else held / 2 < sum(sizes) < held
    engine = EngineConfig(str(checkpoint), quantization="planes", dtype="float32", tensor_parallel_size=num_devices)
    assert make_plan(engine, parse_target("cpu")).memory.weights == held


def test_names_outside_the_registry_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of \[None, 'int8', 'int4', 'fp8', 'planes'\], .* got 'nibbles'"):
        EngineConfig(quantization="nibbles")

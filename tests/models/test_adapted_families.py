"""Adapters of every family against PEFT: fused, latent, recurrent and transposed matrices, packed or not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.layers.token_context import TokenAdapters, TokenContext
from jaxserve.models import adapter_layout, decoder, registry
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.params import matrix_transform, stack_layers
from jaxserve.pallas_kernels import packed_linear
from jaxserve.weights.adapter_files import read_adapter
from tests.adapters import separate_logits, write_adapters
from tests.checkpoints import write_checkpoint
from tests.models.test_parity import TOLERANCE, DenseAttention
from tests.own_programs import UNOPTIMIZED
from tests.parameters import some_by_default

pytest.importorskip("peft")

NUM_TOKENS, RANK = 12, 16
FAMILIES = ("llama", "phi3", "gpt2", "deepseek_v3", "qwen3_5", "qwen2_moe", "granite_moe_hybrid", "gemma3", "gpt_neox")
FAMILIES += ("deepseek_v2", "qwen3_next", "qwen3", "mistral", "gemma4")
# Other modules are not supported yet, or PEFT takes their names for those of routed experts.
MLA = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
MODULES = {"deepseek_v2": MLA, "deepseek_v3": MLA}
IS_NATIVE = [False] + ([True] if packed_linear.unsupported("float32", jax.default_backend()) is None else [])


@pytest.mark.parametrize("is_native", IS_NATIVE)
@pytest.mark.parametrize("family", some_by_default(FAMILIES, *FAMILIES[:6]))
def test_adapters_have_the_logits_of_peft(tmp_path, family, is_native):
    model = write_checkpoint(tmp_path / "model", family, **{"num_hidden_layers": 2} if family == "llama" else {})
    fields = {"target_modules": MODULES.get(family, "all-linear"), "exclude_modules": ["gate", "shared_expert_gate"]}
    peft = write_adapters(model, tmp_path, {"one": {"r": 3, **fields}, "two": {"r": 16, **fields}})
    arch = registry.from_hf_config(weights.read_config(tmp_path / "model")).within(NUM_TOKENS)
    specs = registry.param_specs(arch)
    transform = matrix_transform(specs, native=is_native)
    params = weights.load(tmp_path / "model", specs, jnp.float32, transform=transform)
    is_scanned = family == "llama" and not is_native  # like TPUs
    params = stack_layers(params, arch.period, num_first=arch.num_first_layers) if is_scanned else params
    layout = AdapterLayout(3, RANK, dtype="float32", is_native=is_native, is_scanned=is_scanned)
    stacks = layout.new(arch)
    for slot, name in enumerate(("two", "one"), 1):
        own = layout.place(read_adapter(tmp_path / name), arch, None)
        stacks = jax.jit(adapter_layout.set_adapter)(stacks, jnp.int32(slot), own)
    ids = np.random.default_rng(0).integers(3, arch.vocab_size, NUM_TOKENS).astype(np.int32)
    names = ["one", "two", "__base__"]
    expected = [separate_logits(peft, ids.tolist(), name) for name in names]

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def logits(params, stacks, adapter):
        adapters = TokenAdapters.from_slots(jnp.full(NUM_TOKENS, adapter), layout.num_slots)
        tokens = TokenContext(jnp.arange(NUM_TOKENS), DenseAttention(jnp.int32(0)), adapters=adapters)
        adapted = adapter_layout.with_adapters(params, stacks)
        return decoder.compute_logits(params, arch, decoder.forward(adapted, arch, jnp.asarray(ids), tokens)[0])

    for adapter, wanted in zip((3, 2, 0), expected, strict=True):
        found = np.asarray(logits(params, stacks, jnp.int32(adapter)))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)

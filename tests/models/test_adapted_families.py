"""Adapters of every family against PEFT: fused, latent, recurrent and transposed matrices, packed or not."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.api.lora_request import LORA_EXTRAS
from jaxserve.errors import ConfigError
from jaxserve.layers.token_context import TokenAdapters, TokenContext
from jaxserve.models import decoder, registry
from jaxserve.models.adapted_params import make_set_adapter, with_adapters
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.params import matrix_transform, stack_layers
from jaxserve.pallas_kernels import packed_linear
from jaxserve.weights.adapter_files import make_adapter, read_adapter
from tests.adapters import ATTENTION, MLP, separate_logits, write_adapters
from tests.checkpoints import write_checkpoint
from tests.models.test_parity import TOLERANCE, DenseAttention
from tests.own_programs import UNOPTIMIZED
from tests.parameters import some_by_default

pytest.importorskip("peft")

NUM_TOKENS, RANK, MAX_LEN = 20, 16, 64  # so many tokens that phi3 has the long factors of LongRoPE
FAMILIES = ("llama", "phi3", "gpt2", "deepseek_v3", "qwen3_5", "qwen2_moe", "granite_moe_hybrid", "gemma3", "gpt_neox")
FAMILIES += ("deepseek_v2", "qwen3_next", "qwen3", "mistral", "gemma4")
# Other modules are not supported yet, or PEFT takes their names for those of routed experts.
MLA = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
MODULES = {"deepseek_v2": MLA, "deepseek_v3": MLA}
IS_NATIVE = [False] + ([True] if packed_linear.unsupported("float32", jax.default_backend()) is None else [])


PARAMETERS = ("gate_up", "down")  # experts' parameters, in the order in which PEFT wraps them
# Adapters of llama with more than factors in layers, by the extra that they need.
VARIANTS = {
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "use_dora": {"target_modules": [*ATTENTION, *MLP, "embed_tokens", "lm_head"], "use_dora": True},
    "trainable_tokens": {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [7, 130, 4]},
    "tokens_by_module": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [4, 7], "lm_head": [7, 30, 31]},
    },
    "lora_bias": {"target_modules": ["k_proj", "up_proj", "down_proj", "lm_head"], "lora_bias": True},
}


@pytest.mark.parametrize("is_native", IS_NATIVE)
@pytest.mark.parametrize("family", some_by_default(FAMILIES, *FAMILIES[:6]))
def test_adapters_have_the_logits_of_peft(tmp_path, family, is_native):
    model = write_checkpoint(tmp_path / "model", family, **{"num_hidden_layers": 2} if family == "llama" else {})
    fields = {"target_modules": MODULES.get(family, "all-linear")}
    configs = {"one": {"r": 3, **fields}, "two": {"r": 16, **fields}}
    check(tmp_path, model, configs, is_native=is_native, is_scanned=family == "llama" and not is_native, extras=())


@pytest.mark.parametrize("is_native", IS_NATIVE)
@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_variants_have_the_logits_of_peft(tmp_path, is_tied, is_native):
    """With tied embeddings, adapters of one of both matrices leave the other, as in PEFT."""
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": is_tied}
    model = write_checkpoint(tmp_path / "model", "llama", **sizes)
    configs = {name: {"r": 3, **fields} for name, fields in VARIANTS.items()}
    if is_tied:
        configs |= {"table": {"r": 5, "target_modules": ["embed_tokens"]}}
        configs |= {"head": {"r": 5, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}
        tied = {"ensure_weight_tying": True}
        configs |= {"tied factors": {"target_modules": ["q_proj", "embed_tokens"]} | tied}
        configs |= {"tied matrices": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]} | tied}
        configs |= {"tied tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [9]} | tied}
    check(tmp_path, model, configs, is_native=is_native, is_scanned=is_tied and not is_native)


@pytest.mark.parametrize("is_native", IS_NATIVE)
@pytest.mark.parametrize(
    "family",
    some_by_default(("qwen3_moe", "qwen2_moe", "deepseek_v3", "mixtral", "gpt_oss", "granite_moe_hybrid"), "qwen3_moe"),
)
def test_adapters_of_experts_have_the_logits_of_peft(tmp_path, family, is_native):
    sizes = {"num_hidden_layers": 2, "decoder_sparse_step": 1} if family == "qwen3_moe" else {}
    model = write_checkpoint(tmp_path / "model", family, **sizes)
    experts = f"{'block_sparse_moe' if family.startswith('granite') else 'mlp'}.experts"
    targets = {"target_modules": ["o_proj"], "target_parameters": [f"{experts}.{name}_proj" for name in PARAMETERS]}
    configs = {"one": {"r": 3, **targets}, "two": {"r": 16, **targets}}
    configs["down"] = {"r": 5, "target_modules": ["q_proj"], "target_parameters": [f"{experts}.down_proj"]}
    is_scanned = family == "qwen3_moe" and not is_native
    check(tmp_path, model, configs, is_native=is_native, is_scanned=is_scanned, extras=("experts",))


@pytest.mark.parametrize("is_native", IS_NATIVE)
@pytest.mark.parametrize("family", some_by_default(("deepseek_v2", "deepseek_v3"), "deepseek_v3"))
def test_adapters_of_latents_have_the_logits_of_peft(tmp_path, family, is_native):
    model = write_checkpoint(tmp_path / "model", family)
    configs = {
        "one": {"r": 3, "target_modules": ["kv_b_proj"]},
        "two": {"r": 16, "target_modules": [*MLA, "kv_b_proj"]},
    }
    check(tmp_path, model, configs, is_native=is_native, extras=("latents",))


def test_adapters_of_latents_are_refused_by_name_unless_they_fit(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v3")
    arch = registry.from_hf_config(weights.read_config(tmp_path)).within(NUM_TOKENS)
    spec = next(each for each in registry.param_specs(arch) if each.path[-1] == "kv_b_proj")
    (out, inner), name = spec.shape, spec.hf_names[0].removesuffix(".weight")
    tensors = {f"{name}.lora_A.weight": np.ones((4, inner)), f"{name}.lora_B.weight": np.ones((out, 4))}

    def place(extras, **config):
        layout = AdapterLayout(2, RANK, dtype="float32", is_native=False, is_scanned=False, extras=extras)
        layout.place(make_adapter({"r": 4} | config, tensors, "the adapter"), arch, None)

    place(("latents",))
    with pytest.raises(ConfigError, match="kv_b_proj need lora_extras with 'latents'"):
        place(())
    with pytest.raises(ConfigError, match="kv_b_proj must have factors only and apply to whole prompts"):
        place(("latents",), alora_invocation_tokens=[3])


@pytest.mark.parametrize("family", some_by_default(("gemma3", "granite", "gpt2"), "gemma3"))
def test_adapters_of_scaled_embeddings_have_the_logits_of_peft(tmp_path, family):
    targets = ["wte", "c_attn"] if family == "gpt2" else ["embed_tokens", "v_proj"]
    configs = {"one": {"target_modules": targets}, "dora": {"target_modules": targets, "use_dora": True}}
    configs["tokens"] = {"target_modules": targets[1:], "trainable_token_indices": [*range(3, 40)]}
    check(tmp_path, write_checkpoint(tmp_path / "model", family), configs, is_native=False)


def check(tmp_path, model, configs, *, is_native, is_scanned=False, extras=LORA_EXTRAS):
    """Check that each configuration's adapter has PEFT's logits, in stacks that hold all of them."""
    pefts = {name: write_adapters(copy.deepcopy(model), tmp_path, {name: configs[name]}) for name in configs}
    arch = registry.from_hf_config(weights.read_config(tmp_path / "model")).within(MAX_LEN)
    specs = registry.param_specs(arch)
    transform = matrix_transform(specs, native=is_native)
    params = weights.load(tmp_path / "model", specs, jnp.float32, transform=transform)
    params = stack_layers(params, arch.period, num_first=arch.num_first_layers) if is_scanned else params
    layout = AdapterLayout(
        len(configs) + 1, RANK, dtype="float32", is_native=is_native, is_scanned=is_scanned, extras=extras
    )
    stacks, set_adapter = layout.new(arch), jax.jit(make_set_adapter(layout, arch, None))
    for slot, name in enumerate(configs, 1):
        own = layout.place(read_adapter(tmp_path / name), arch, None)
        stacks = set_adapter(stacks, jnp.int32(slot), own, params if layout.reads_weights else {})
    ids = np.random.default_rng(0).integers(3, arch.vocab_size, NUM_TOKENS).astype(np.int32)
    ids[-4:] = [7, 4, 130, 30]  # some adapters train it
    names = [*configs, "__base__"]
    pefts["__base__"] = pefts[names[0]]
    expected = [separate_logits(pefts[name], ids.tolist(), name) for name in names]

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def logits(params, stacks, adapter):
        adapters = TokenAdapters(jnp.full(NUM_TOKENS, adapter), layout.num_slots)
        tokens = TokenContext(jnp.arange(NUM_TOKENS), DenseAttention(jnp.int32(0)), adapters=adapters)
        adapted = with_adapters(params, stacks)
        hidden, _ = decoder.forward(adapted, arch, jnp.asarray(ids), tokens)
        return decoder.compute_logits(adapted, arch, hidden, adapters=adapters)

    for name, adapter, wanted in zip(names, [*range(2, len(names) + 1), 0], expected, strict=True):
        found = np.asarray(logits(params, stacks, jnp.int32(adapter)))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE, err_msg=name)

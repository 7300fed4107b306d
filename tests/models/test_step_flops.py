"""Floating-point operations of a step against XLA's count of a compiled program.

XLA counts nothing for custom calls, and the body of a loop once; the serving attention is loops. So attention here is
dense, one row over all its tokens: a product of all queries with all keys, which `num_scores` must then count.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import FAMILIES, LATENT, MIXTURES, VARIED, hf_dict
from jax import Array

from jaxserve.layers.token_context import Attention, LayerContext, TokenContext
from jaxserve.models import decoder, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec, device_bytes, lookup_bytes, stack_layers, step_bytes
from jaxserve.models.weight_reads import WeightReads
from jaxserve.pallas_kernels.ragged_paged_attention import HeadMatrices, apply_rope
from jaxserve.weights.rows import build_tree
from tests.own_programs import UNOPTIMIZED
from tests.parameters import some_by_default

SIZES = {"hidden_size": 256, "intermediate_size": 688, "vocab_size": 2048, "num_hidden_layers": 2}
OWN_SIZES = {"gemma4": {"num_hidden_layers": 5, "hidden_size_per_layer_input": 64}}
ONE_GROUP = {family: {"n_group": 1, "topk_group": 1} for family in LATENT}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseAttention(Attention):
    """Causal attention over one whole sequence; the states of recurrent layers are not computed."""

    shared: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def attend(
        self, q: Array, k: Array | None, v: Any, layer: LayerContext, sinks: Array | None, index: Any = None
    ) -> tuple[Array, "DenseAttention"]:
        k, v, shared = layer.options.share(k, v, self.shared)
        expand = None
        if isinstance(v, HeadMatrices):  # absorbed
            expand, nope_dim = v.to_values, v.to_keys.shape[1]
            q = jnp.concatenate([jnp.einsum("tqn,qnr->tqr", q[..., :nope_dim], v.to_keys), q[..., nope_dim:]], axis=-1)
            v = k[..., : v.to_keys.shape[2]]
        T, K, H = k.shape
        q, k = (x if layer.rope is None else _rotate(x, layer.rope) for x in (q, k))
        grouped = q.reshape(T, K, -1, H)
        scores = jnp.einsum("tkgh,skh->kgts", grouped, k) * layer.attention.options.scale
        weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool)[None, None], scores, -1e30))
        out = jnp.einsum("kgts,skh->tkgh", weights, v).reshape(T, q.shape[1], -1)
        return out if expand is None else jnp.einsum("tqr,qvr->tqv", out, expand), dataclasses.replace(
            self, shared=shared
        )

    def advance(self, inputs: Any, layer: LayerContext) -> tuple[Array, "DenseAttention"]:
        return jnp.zeros((len(inputs[0]), *layer.state.new(1, 1).memory.shape[2:4])), self


def _rotate(x: Array, rope: Array) -> Array:
    """Rotate the last elements, which are all of a head that has keys of its own."""
    first = x.shape[-1] - 2 * rope.shape[-1]
    return jnp.concatenate([x[..., :first], apply_rope(x[..., first:], rope)], axis=-1)


def zeros_of(specs: list[ParamSpec]) -> Params:
    """Return parameters of the right shapes."""
    return build_tree(specs, lambda spec: jax.device_put(np.zeros(spec.shape, np.float32)))


def compiled_flops(arch: ArchConfig, num_tokens: int, num_rows: int) -> float:
    def step(params: Params, token_ids: Array) -> Array:
        tokens = TokenContext(jnp.arange(num_tokens), DenseAttention())
        hidden, _ = decoder.forward(params, arch, token_ids, tokens)
        return decoder.compute_logits(params, arch, hidden[:num_rows])

    specs = registry.param_specs(arch)
    params = build_tree(specs, lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32))
    token_ids = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    options = UNOPTIMIZED  # compiles faster to the same operations
    (cost,) = [jax.jit(step).lower(params, token_ids).compile(options).cost_analysis()]
    return cost["flops"]


@pytest.mark.parametrize("family", some_by_default(FAMILIES, "llama", "gemma4", "olmoe", "deepseek_v3"))
@pytest.mark.parametrize(
    ("num_tokens", "num_rows"),
    [*(pytest.param(n, n, marks=pytest.mark.full) for n in (1, 6, 64)), (384, 64)],
)
def test_within_a_tenth_of_what_xla_counts(family: str, num_tokens: int, num_rows: int) -> None:
    # With one expert, as XLA:CPU computes a ragged product for every expert and all rows.
    experts = {"num_experts": 1, "num_experts_per_tok": 1, **ONE_GROUP.get(family, {})} if family in MIXTURES else {}
    arch = registry.from_hf_config(hf_dict(family, **{**SIZES, **OWN_SIZES.get(family, {})}, **experts))
    scores = num_tokens * num_tokens * len(arch.attention_layers)
    of_states = (
        num_tokens * (arch.num_layers - len(arch.attention_layers)) * arch.state.token_flops if arch.state else 0
    )  # computed in loops
    assert registry.flop_counts(arch).step(num_tokens, num_rows, scores) - of_states == pytest.approx(
        compiled_flops(arch, num_tokens, num_rows), rel=0.1
    )


@pytest.mark.parametrize("family", some_by_default(FAMILIES, *VARIED))
def test_steps_read_tables_by_rows_and_all_else_whole(family: str) -> None:
    arch = registry.from_hf_config(hf_dict(family))
    specs = registry.param_specs(arch)
    params = zeros_of(specs)
    whole = sum(array.nbytes for array in jax.tree.leaves(params))
    embeddings, positions = 4 * arch.vocab_size * arch.hidden_size, 4 * arch.max_position * arch.hidden_size
    has_positions = "position_embed" in params
    inputs = (
        4 * arch.num_layers * arch.per_layer_embeddings.size if arch.per_layer_embeddings else 0
    )  # all layers, one token
    assert lookup_bytes(params, specs, device_bytes) == 4 * arch.hidden_size * (1 + has_positions) + inputs
    tables = has_positions * positions + (
        arch.per_layer_embeddings.vocab_size * inputs if arch.per_layer_embeddings else 0
    )
    assert step_bytes(params) == whole - tables - (not arch.tied_embeddings) * embeddings


@pytest.mark.parametrize("family", some_by_default(MIXTURES, "mixtral", "deepseek_v3", "gpt_oss"))
def test_steps_read_and_multiply_with_the_experts_of_their_tokens(family: str) -> None:
    sizes = {**SIZES, "num_experts": 16, **ONE_GROUP.get(family, {})}
    arch = registry.from_hf_config(hf_dict(family, **sizes, num_experts_per_tok=3))
    assert arch.experts is not None
    specs = registry.param_specs(arch)
    params = zeros_of(specs)
    num_sparse = arch.num_moe_layers
    expert = num_sparse * 3 * arch.hidden_size * arch.experts.ffn_size  # elements of one in all layers
    has_biases = "experts_down_bias" in params["layers"][-1]
    biases = num_sparse * (2 * arch.experts.ffn_size + arch.hidden_size) * has_biases
    row = arch.hidden_size * 4
    trees = [params]
    if num_sparse == arch.num_layers:
        trees.append(stack_layers(dict(params, layers=[dict(layer) for layer in params["layers"]]), arch.period))
    for tree in trees:
        reads = WeightReads.from_params(tree, specs, device_bytes)
        assert reads.step(1) == step_bytes(params) + row - 13 * 4 * (expert + biases)
        assert reads.step(5) == step_bytes(params) + 5 * row - 4 * (expert + biases)
        assert reads.step(9, 1) == reads.step(1) + 8 * row
        assert reads.step(6) == step_bytes(params) + 6 * row
    every = registry.from_hf_config(hf_dict(family, **sizes, num_experts_per_tok=16))
    assert registry.flop_counts(every).per_token - registry.flop_counts(arch).per_token == 2 * 13 * expert

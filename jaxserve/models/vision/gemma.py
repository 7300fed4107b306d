"""Gemma 3's projector, which averages blocks of patches, and Gemma 4's encoder and projector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import Weight, linear
from jaxserve.layers.mlp import activation_function
from jaxserve.layers.norm import NormFunction, layer_norm, offset_norm, rms_norm
from jaxserve.models.hf_config import POSITIVE, SIZE, SWITCH, TABLE, HfConfig, one_of, read_fields
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import POSITION_EMBED, Params, ParamSpec
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Encoder, Projector, axial_rope
from jaxserve.models.vision.inputs import EncoderInputs
from jaxserve.models.vision.pixtral import merged_blocks, raster_operands
from jaxserve.pallas_kernels.span_attention import SpanInputs, attend


def _parse_gemma3(config: HfConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return VisionArch fields for Gemma 3's projector."""
    values = read_fields({"mm_tokens_per_image": 256, **config}, {"mm_tokens_per_image": SIZE})
    rows, side = fields["grid"][0], int(values["mm_tokens_per_image"] ** 0.5)
    if rows % side or side * side != values["mm_tokens_per_image"]:
        raise ConfigError(
            f"mm_tokens_per_image must be a square whose root divides the {rows} rows of patches, got "
            f"{values['mm_tokens_per_image']}"
        )
    return {
        "feature_layers": (fields["num_layers"],),
        "merge_size": rows // side,
        "has_final_norm": True,
        "projector_eps": fields["norm_eps"],
    }


def _gemma3_specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the ParamSpecs for Gemma 3's projector."""
    rows, D = Rows(("vision", "projector"), "model.multi_modal_projector.", "zeros"), arch.hidden_size
    projection = ["mm_input_projection_weight"]
    return [
        *rows.norm("norm", "mm_soft_emb_norm", D),
        rows.tensor("projection", (None, None), projection, [arch.out_size], D, transposed=True, exact=True),
    ]


def _project_gemma3(
    p: Params, arch: VisionArch, states: Sequence[Float[Array, "P D"]], _: EncoderInputs
) -> Float[Array, "E out"]:
    """Return an embedding per block of patches."""
    assert arch.grid is not None, "images have one size"
    (rows, columns), m = arch.grid, arch.merge_size
    x = layer_norm(states[0], p["final_norm"], arch.norm_eps)
    x = x.reshape(-1, rows // m, m, columns // m, m, arch.hidden_size).mean(axis=(2, 4))
    x = offset_norm(x.reshape(-1, arch.hidden_size), p["projector"]["norm"], arch.projector_eps)
    return linear(x, p["projector"]["projection"])


GEMMA3 = Projector(_parse_gemma3, _gemma3_specs, _project_gemma3)

_GATED = {"gelu_pytorch_tanh": "geglu", "gelu": "exact_geglu", "silu": "swiglu"}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_FIELDS = {
    **dict.fromkeys((*_SIZES, "head_dim", "patch_size", "position_embedding_size", "pooling_kernel_size"), SIZE),
    "hidden_activation": one_of(_GATED),
    "rms_norm_eps": POSITIVE,
    "attention_bias": one_of(()).or_null(),
    "rope_parameters": TABLE.or_null(),
    "use_clipped_linears": SWITCH,
    "standardize": SWITCH,
}
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_PROJECTIONS = {  # key: name in `layers`; heads' and MLPs' matrices in checkpoints
    **{f"{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _parse_gemma4(config: HfConfig) -> dict[str, Any]:
    """Return VisionArch fields for a Gemma 4 `vision_config`."""
    values = {**_DEFAULTS, **config}
    if not values.get("attention_bias"):
        values["attention_bias"] = None
    values = read_fields(values, _FIELDS)
    heads, head_dim = values["num_attention_heads"], values["head_dim"]
    if values["num_key_value_heads"] != heads:
        raise ConfigError(
            f"vision_config: num_key_value_heads must be num_attention_heads, got {values['num_key_value_heads']} and "
            f"{heads}"
        )
    if head_dim % 4:
        raise ConfigError(f"vision_config: head_dim must be a multiple of 4 for 2-D RoPE, got {head_dim}")
    rope = {"rope_type": "axial", "rope_theta": 100.0, **(values["rope_parameters"] or {})}
    rope = read_fields(rope, {"rope_type": one_of(("axial", "default")), "rope_theta": POSITIVE})
    side = values["patch_size"]
    return {
        "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"],
        "num_stored_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "head_dim": head_dim,
        "ffn_size": values["intermediate_size"],
        "patch_shape": (3, side, side),
        "activation": _GATED[values["hidden_activation"]],
        "norm_eps": values["rms_norm_eps"],
        "rope_theta": float(rope["rope_theta"]),
        "merge_size": values["pooling_kernel_size"],
        "position_side": values["position_embedding_size"],
        "is_clipped": values["use_clipped_linears"],
        "is_standardized": values["standardize"],
    }


def _gemma4_specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the encoder's ParamSpecs."""
    D, F, H = arch.hidden_size, arch.ffn_size, arch.head_dim
    assert arch.position_side is not None, "the tower has position embeddings"
    rows, table = Rows(("vision",), "model.vision_tower."), ["patch_embedder.position_embedding_table"]
    specs = [
        rows.matrix("patch_proj", (None, None), ["patch_embedder.input_proj"], [D], arch.patch_size, exact=True),
        rows.tensor(POSITION_EMBED, (None, None, None), table, [2], arch.position_side, D),
    ]
    heads, ffn, attended = arch.axis("heads"), arch.axis("ffn"), arch.num_heads * H
    sizes = {
        **{f"{part}_proj": (attended, D, (heads, None)) for part in "qkv"},
        "o_proj": (D, attended, (None, heads)),
        **{f"{part}_proj": (F, D, (ffn, None)) for part in ("gate", "up")},
        "down_proj": (D, F, (None, ffn)),
    }
    norms = {"input_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm"}
    norms |= {"mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
    for index in range(arch.num_layers):
        rows = Rows(("vision", "layers", index), f"model.vision_tower.encoder.layers.{index}.")
        for name, module in _PROJECTIONS.items():
            size, inner, axes = sizes[name]
            by_head = {"heads": (arch.num_heads,)} if name[0] in "qkv" else {}
            specs.append(rows.matrix(name, axes, [f"{module}.linear"], [size], inner, exact=True, **by_head))
            if arch.is_clipped:
                bounds = [f"{module}.{bound}" for bound in _BOUNDS]
                specs.append(rows.vector(f"{name}_bounds", None, bounds, [1] * 4, "zeros"))
        for name, module in norms.items():
            specs += rows.norm(name, module, D)
        specs += [spec for part in "qk" for spec in rows.norm(f"{part}_norm", f"self_attn.{part}_norm", H)]
    return specs


def _embed_gemma4(p: Params, arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "P D"]:
    """Return the first layer's inputs: patches scaled to [-1, 1], and embeddings of their columns and rows."""
    table = p[POSITION_EMBED]
    scaled = 2 * (jnp.asarray(inputs.patches) - 0.5)  # float32: a narrower dtype has few values around 0.5
    x = linear(scaled.astype(table.dtype), p["patch_proj"])
    positions = jnp.asarray(inputs.positions)
    return x + table[0][positions[:, 1]] + table[1][positions[:, 0]]


def _clipped(
    x: Float[Array, "T in"], p: Params, name: str, axis: tuple[str, ...] | None = None
) -> Float[Array, "T out"]:
    """Apply a matrix; clip its inputs and outputs if it has bounds."""
    weight: Weight = p[name]
    bounds = p.get(f"{name}_bounds")
    if bounds is None:
        return linear(x, weight, axis=axis)
    return jnp.clip(linear(jnp.clip(x, bounds[0], bounds[1]), weight, axis=axis), bounds[2], bounds[3])


def _gemma4_layer(
    p: Params,
    x: Float[Array, "T D"],
    rope: Float[Array, "2 T half"],
    spans: Int[Array, "2 T"],
    *,
    arch: VisionArch,
    norm: NormFunction,
) -> Float[Array, "T D"]:
    """Apply one layer, with norms before and after attention and MLP; see `encoder.layer`."""
    shape, eps = (len(x), arch.num_heads, arch.head_dim), arch.norm_eps
    with jax.named_scope("attention"):
        normed = norm(x, p["input_norm"], eps)
        q, k, v = (_clipped(normed, p, f"{part}_proj").reshape(shape) for part in "qkv")
        q, k = (norm(each, p[f"{part}_norm"], eps) for part, each in (("q", q), ("k", k)))
        v = norm(v, jnp.ones_like(v[0, 0]), eps)
        inputs = SpanInputs(_halves(q), _halves(k), v, spans, rope)
        out = _clipped(attend(inputs, 1.0).reshape(len(x), -1), p, "o_proj", arch.tensor_axis)
        x += norm(out, p["attention_post_norm"], eps)
    with jax.named_scope("mlp"):
        normed = norm(x, p["mlp_norm"], eps)
        gate_up = jnp.concatenate([_clipped(normed, p, f"{part}_proj") for part in ("gate", "up")], axis=1)
        out = _clipped(activation_function(arch.activation)(gate_up), p, "down_proj", arch.tensor_axis)
        return x + norm(out, p["mlp_post_norm"], eps)


def _halves(x: Float[Array, "T heads H"]) -> Float[Array, "T heads H"]:
    """Reorder head dimensions so that dimension i rotates with i + H / 2; columns rotate the first half, rows the rest.

    Scores stay the same, as queries and keys have the same order.
    """
    return jnp.swapaxes(x.reshape(*x.shape[:2], 2, 2, -1), 2, 3).reshape(x.shape)


def _rope(arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "2 P half"]:
    """Return all layers' cosines and sines."""
    assert arch.rope_theta is not None, "the tower has RoPE"
    return axial_rope(jnp.asarray(inputs.positions)[:, ::-1], arch.rope_theta, arch.head_dim)


GEMMA4_ENCODER = Encoder(
    _parse_gemma4, _gemma4_specs, _embed_gemma4, rms_norm, _gemma4_layer, operands=raster_operands, rope=_rope
)


def _gemma4_projector_specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the ParamSpecs for Gemma 4's projector."""
    D, tower = arch.hidden_size, Rows(("vision", "projector"), "model.vision_tower.")
    rows = Rows(("vision", "projector"), "model.embed_vision.")
    specs = [rows.matrix("projection", (None, None), ["embedding_projection"], [arch.out_size], D, exact=True)]
    if arch.is_standardized:
        specs.append(tower.vector("bias", None, ["std_bias"], [D], "zeros"))
        specs.append(tower.vector("scale", None, ["std_scale"], [D], "ones"))
    return specs


def _project_gemma4(
    p: Params, arch: VisionArch, states: Sequence[Float[Array, "P D"]], inputs: EncoderInputs
) -> Float[Array, "E out"]:
    """Return an embedding per block of patches."""
    assert inputs.outputs is not None, "blocks are packed"
    p, dtype = p["projector"], states[0].dtype
    # float32, as sums may exceed float16's range, and subtracting the bias cancels large values.
    x = states[0].astype(jnp.float32)[inputs.outputs.index].mean(axis=1) * arch.hidden_size**0.5
    if arch.is_standardized:
        bias, scale = (p[name].astype(jnp.float32)[None] for name in ("bias", "scale"))
        x = (x - bias) * scale
    x = x.astype(dtype)
    return linear(rms_norm(x, jnp.ones_like(x[0]), arch.norm_eps), p["projection"])


GEMMA4 = Projector(
    lambda _, fields: {"feature_layers": (fields["num_layers"],)},
    _gemma4_projector_specs,
    _project_gemma4,
    merged_blocks,
)

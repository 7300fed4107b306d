"""The Qwen families' encoders and mergers: patches in blocks that share an embedding, 2-D RoPE, windows, DeepStack."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from jaxserve.api import schema
from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import ACTIVATIONS, activation_function
from jaxserve.layers.norm import NormFunction, layer_norm, rms_norm
from jaxserve.models.hf_config import SIZE, TABLE, HfConfig, one_of, read_field, read_fields
from jaxserve.models.layer_tensors import Rows
from jaxserve.models.params import POSITION_EMBED, Params, ParamSpec
from jaxserve.models.vision import encoder
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import Encoder, Projector, axial_rope, unfolded
from jaxserve.models.vision.inputs import EncoderInputs, Grid, Packed, Taps, TowerImage, axis_taps

_INDEX = schema.integer(0)
_INDICES = FieldType(
    "a list of layers in ascending order",
    lambda value: isinstance(value, list | tuple) and all(map(_INDEX.holds, value)) and [*value] == sorted({*value}),
)
_FIELDS = {
    **dict.fromkeys(("depth", "hidden_size", "num_heads", "in_channels", "patch_size", "spatial_merge_size"), SIZE),
    "temporal_patch_size": SIZE,
    "hidden_act": one_of({*ACTIVATIONS, "silu"}),
    "rope_parameters": TABLE.or_null(),
}
_DEFAULTS = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2 = {**_DEFAULTS, "embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_QWEN2_5 = {
    **_DEFAULTS,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3 = {
    **_DEFAULTS,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_NORM_EPS = 1e-6
_LAYER_NORM = ("weight", "bias")
_Names = dict[str, tuple[str, ...]]
_NAMES: dict[str, _Names] = {  # checkpoint modules: MLP, then norm and matrices in mergers
    "qwen2_vl": {"mlp": ("mlp.fc1", "mlp.fc2"), "merger": ("ln_q", "mlp.0", "mlp.2")},
    "qwen2_5_vl": {
        "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        "merger": ("ln_q", "mlp.0", "mlp.2"),
    },
    "qwen3_vl": {"mlp": ("mlp.linear_fc1", "mlp.linear_fc2"), "merger": ("norm", "linear_fc1", "linear_fc2")},
}


def _fields(config: HfConfig) -> dict[str, Any]:
    """Return the VisionArch fields that all versions share, for a `vision_config` with defaults merged in."""
    values = read_fields(config, _FIELDS)
    side = values["patch_size"]
    return {
        **encoder.read_layers(values, "depth", "num_heads", has_axes=True),
        "patch_shape": (values["in_channels"], values["temporal_patch_size"], side, side),
        "norm_eps": _NORM_EPS,
        "activation": values["hidden_act"],
        "merge_size": values["spatial_merge_size"],
        "rope_theta": encoder.read_axial_theta(values["rope_parameters"], 1e4),
    }


def _parse_qwen2(config: HfConfig) -> dict[str, Any]:
    """Return VisionArch fields for Qwen2-VL, in whose files `hidden_size` is the decoder's."""
    config = {**_QWEN2, **config}
    sizes = read_fields(config, {"embed_dim": SIZE, "mlp_ratio": SIZE})
    fields = _fields({**config, "hidden_size": sizes["embed_dim"]})
    return {**fields, "ffn_size": sizes["embed_dim"] * sizes["mlp_ratio"]}


def _parse_qwen2_5(config: HfConfig) -> dict[str, Any]:
    """Return VisionArch fields for Qwen2.5-VL, whose layers mostly attend to windows."""
    config = {**_QWEN2_5, **config}
    own = {"intermediate_size": SIZE, "window_size": SIZE, "fullatt_block_indexes": _INDICES}
    values, fields = read_fields(config, own), _fields(config)
    if fields["activation"] != "silu":
        raise ConfigError(f"vision_config: hidden_act must be silu, got {fields['activation']!r}")
    block = fields["merge_size"] * config["patch_size"]
    if values["window_size"] < block:
        raise ConfigError(
            f"vision_config: window_size must be at least spatial_merge_size x patch_size, got "
            f"{values['window_size']} and {block}"
        )
    return {
        **fields,
        "activation": "swiglu",
        "ffn_size": values["intermediate_size"],
        "window": values["window_size"] // block,
        "full_layers": tuple(values["fullatt_block_indexes"]),
    }


def _parse_qwen3(config: HfConfig) -> dict[str, Any]:
    """Return VisionArch fields for Qwen3-VL and Qwen3.5, with interpolated position embeddings."""
    config = {**_QWEN3, **config}
    values = read_fields(config, {"intermediate_size": SIZE, "num_position_embeddings": SIZE})
    side = int(values["num_position_embeddings"] ** 0.5)
    if side * side != values["num_position_embeddings"]:
        raise ConfigError(
            f"vision_config: num_position_embeddings must be a square, got {values['num_position_embeddings']}"
        )
    return {**_fields(config), "ffn_size": values["intermediate_size"], "position_side": side}


def _specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the encoder's ParamSpecs."""
    D, F, names = arch.hidden_size, arch.ffn_size, _NAMES[arch.encoder]["mlp"]
    parts = ("weight",) if arch.encoder == "qwen2_5_vl" else _LAYER_NORM
    rows, axes = Rows(("vision",), "model.visual."), (None,) * (1 + len(arch.patch_shape))
    specs = [rows.tensor("patch_kernel", axes, ["patch_embed.proj.weight"], [D], *arch.patch_shape)]
    if arch.position_side is not None:
        specs.append(rows.vector("patch_bias", None, ["patch_embed.proj.bias"], [D], "zeros"))
        specs.append(rows.tensor(POSITION_EMBED, (None, None), ["pos_embed.weight"], [arch.position_side**2], D))
    heads, ffn, num_heads = arch.axis("heads"), arch.axis("ffn"), (arch.num_heads,) * 3
    up, gates = "up" if len(names) == 2 else "gate_up", names[:-1]
    for index in range(arch.num_layers):
        rows = Rows(("vision", "layers", index), f"model.visual.blocks.{index}.")
        specs += [
            *rows.norm("input_norm", "norm1", D, parts if len(parts) > 1 else ()),
            rows.matrix("qkv_proj", (heads, None), ["attn.qkv"] * 3, [D] * 3, D, heads=num_heads, exact=True),
            rows.vector("qkv_bias", heads, ["attn.qkv.bias"] * 3, [D] * 3, "zeros", heads=num_heads),
            rows.matrix("o_proj", (None, heads), ["attn.proj"], [D], D, exact=True),
            rows.vector("o_bias", None, ["attn.proj.bias"], [D], "zeros"),
            *rows.norm("mlp_norm", "norm2", D, parts if len(parts) > 1 else ()),
            rows.matrix(f"{up}_proj", (ffn, None), gates, [F] * len(gates), D, gated=len(gates) > 1, exact=True),
            rows.vector(f"{up}_bias", ffn, [f"{name}.bias" for name in gates], [F] * len(gates), "zeros"),
            rows.matrix("down_proj", (None, ffn), names[-1:], [D], F, exact=True),
            rows.vector("down_bias", None, [f"{names[-1]}.bias"], [D], "zeros"),
        ]
    return specs


def _positions(arch: VisionArch, grid: Grid) -> NDArray[np.int32]:
    """Return row and column of each patch [P, 2] in the processor's order: block by block, blocks by row."""
    rows, columns = grid
    m = arch.merge_size
    both = np.moveaxis(np.indices(grid, dtype=np.int32), 0, -1).reshape(rows // m, m, columns // m, m, 2)
    return both.swapaxes(1, 2).reshape(-1, 2)


def _window_order(arch: VisionArch, grid: Grid) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the index of each block in window order, and the number of blocks in each window."""
    assert arch.window is not None, "the tower has windows"
    rows, columns = (size // arch.merge_size for size in grid)
    row, column = (each.reshape(-1) for each in np.indices((rows, columns)))
    num_across = -(-columns // arch.window)
    window = row // arch.window * num_across + column // arch.window
    return np.argsort(window, kind="stable").astype(np.int32), np.bincount(window).astype(np.int32)


def _order(arch: VisionArch, grid: Grid) -> NDArray[np.int32] | None:
    """Return the index of each patch in the order that windows take."""
    if arch.window is None:
        return None
    blocks, size = _window_order(arch, grid)[0], arch.merge_size**2
    return np.ravel(blocks[:, None] * size + np.arange(size, dtype=np.int32)).astype(np.int32)


def _operands(arch: VisionArch, images: Sequence[TowerImage], num_patches: int) -> dict[str, Any]:
    """Return spans, positions and learned position embeddings, and the spans and order of windows."""
    packed, size = Packed.join(images), arch.merge_size**2
    positions = np.zeros((num_patches, 2), np.int32)
    operands: dict[str, Any] = {"spans": packed.spans(num_patches), "positions": positions}
    for start, end, image in packed.images():
        own, order = _positions(arch, image.grid), _order(arch, image.grid)
        positions[start:end] = own if order is None else own[order]
    if arch.window is not None:
        windows = packed.spans(num_patches)
        rank = np.arange(num_patches // size, dtype=np.int32)
        for start, _, image in packed.images():
            order, counts = _window_order(arch, image.grid)
            bounds = start + size * np.cumsum([0, *counts])
            for first, end in itertools.pairwise(bounds):
                windows[:, first:end] = [[first], [end]]
            rank[start // size + order] = start // size + np.arange(len(order))
        operands |= {"windows": windows, "outputs": Taps(rank[:, None])}
    if arch.position_side is not None:
        index, weight = np.zeros((num_patches, 4), np.int32), np.zeros((num_patches, 4), np.float32)
        for start, end, image in packed.images():
            index[start:end], weight[start:end] = _learned(positions[start:end], image.grid, arch.position_side)
        operands["learned"] = Taps(index, weight)
    return operands


def _learned(positions: NDArray[np.int32], grid: Grid, side: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the four position embeddings [P, 4] around each patch, and their bilinear weights."""
    axes = [axis_taps(positions[:, axis], grid[axis], side, align_corners=True) for axis in (0, 1)]
    (row, row_weight), (column, column_weight) = axes
    index = row[:, :, None] * side + column[:, None, :]
    return index.reshape(-1, 4), (row_weight[:, :, None] * column_weight[:, None, :]).reshape(-1, 4)


def _embed(p: Params, arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "P D"]:
    """Return the first layer's inputs: patches, with interpolated position embeddings if there are some."""
    dtype = p["patch_kernel"].dtype
    x = linear(jnp.asarray(inputs.patches, dtype), unfolded(p["patch_kernel"]), bias=p.get("patch_bias"))
    if inputs.learned is None:
        return x
    table, learned = p[POSITION_EMBED], inputs.learned
    assert learned.weight is not None, "position embeddings are weighted"
    for tap in range(learned.index.shape[1]):
        x += table[learned.index[:, tap]] * learned.weight[:, tap, None].astype(dtype)
    return x


def _rope(arch: VisionArch, inputs: EncoderInputs) -> Float[Array, "2 P half"]:
    """Return all layers' cosines and sines."""
    assert arch.rope_theta is not None, "the tower has RoPE"
    return axial_rope(jnp.asarray(inputs.positions), arch.rope_theta, arch.head_dim)


def _parse_merger(config: HfConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the VisionArch fields for mergers."""
    vision, num_layers = config["vision_config"], fields["num_layers"]
    indices = [*vision.get("deepstack_visual_indexes", _DEEPSTACK.get(config["architectures"][0], ()))]
    read_field({"deepstack_visual_indexes": indices}, "deepstack_visual_indexes", _INDICES)
    if indices and indices[-1] >= num_layers:
        raise ConfigError(
            f"vision_config: deepstack_visual_indexes must be below depth, got {indices} and {num_layers}"
        )
    out_name = "hidden_size" if "embed_dim" in vision else "out_hidden_size"
    out = read_field({out_name: 3584, **vision}, out_name, SIZE)
    if out != fields["out_size"]:
        raise ConfigError(
            f"vision_config: {out_name} must be text_config's hidden_size, got {out} and {fields['out_size']}"
        )
    return {"feature_layers": (*(index + 1 for index in indices), num_layers), "num_features": 1 + len(indices)}


_DEEPSTACK = dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), (8, 16, 24))


def _merger_specs(arch: VisionArch) -> list[ParamSpec]:
    """Return the mergers' ParamSpecs: one for embeddings, and one for each DeepStack layer."""
    names, size, axis = _NAMES[arch.encoder]["merger"], arch.hidden_size * arch.merge_size**2, arch.axis("ffn")
    parts = () if arch.encoder == "qwen2_5_vl" else _LAYER_NORM
    specs = []
    num_deep = len(arch.feature_layers) - 1
    modules = [("merger", arch.hidden_size), *((f"deepstack_merger_list.{index}", size) for index in range(num_deep))]
    for index, (module, norm_size) in enumerate(modules):
        rows = Rows(("vision", "mergers", index), f"model.visual.{module}.")
        specs += [
            *rows.norm("norm", names[0], norm_size, parts),
            rows.matrix("up_proj", (axis, None), names[1:2], [size], size, exact=True),
            rows.vector("up_bias", axis, [f"{names[1]}.bias"], [size], "zeros"),
            rows.matrix("down_proj", (None, axis), names[2:], [arch.out_size], size, exact=True),
            rows.vector("down_bias", None, [f"{names[2]}.bias"], [arch.out_size], "zeros"),
        ]
    return specs


def _merge(
    norm: NormFunction, p: Params, arch: VisionArch, states: Sequence[Float[Array, "P D"]], inputs: EncoderInputs
) -> Float[Array, "E out"]:
    """Return an embedding per block of patches, then the features for the decoder's first layers."""
    *deep, last = states
    size = arch.hidden_size * arch.merge_size**2
    merged = []
    for index, (merger, x) in enumerate(zip(p["mergers"], (last, *deep), strict=True)):
        rows = x.reshape(-1, size) if index else x  # DeepStack's norms are over all patches of a block
        rows = norm(rows, merger["norm"], arch.norm_eps).reshape(-1, size)
        inner = linear(rows, merger["up_proj"], bias=merger["up_bias"], activation=activation_function("gelu"))
        merged.append(linear(inner, merger["down_proj"], bias=merger["down_bias"], axis=arch.tensor_axis))
    out = jnp.concatenate(merged, axis=1)
    return out if inputs.outputs is None else out[inputs.outputs.index[:, 0]]


_COMMON: dict[str, Any] = {"layer": encoder.layer, "operands": _operands, "rope": _rope, "order": _order}
QWEN2_VL = Encoder(_parse_qwen2, _specs, _embed, layer_norm, **_COMMON)
QWEN2_5_VL = Encoder(_parse_qwen2_5, _specs, _embed, rms_norm, **_COMMON)
QWEN3_VL = Encoder(_parse_qwen3, _specs, _embed, layer_norm, **_COMMON)
MERGER = Projector(_parse_merger, _merger_specs, partial(_merge, layer_norm))
RMS_MERGER = Projector(_parse_merger, _merger_specs, partial(_merge, rms_norm))

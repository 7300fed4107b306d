"""Decoder tensors: one ParamSpec each, from layer specs and a family's names in checkpoints."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.layers.experts import Experts
from jaxserve.layers.mlp import swiglu
from jaxserve.models.arch import ArchConfig
from jaxserve.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec, QkNorm
from jaxserve.models.params import POSITION_EMBED, ParamSpec


@dataclass(frozen=True)
class MoeNames:
    """An MoE layer's tensors in checkpoints, without the layer's prefix; None if the family lacks the tensor.

    Attributes:
        router: router projection.
        experts: module with the experts.
        parts: an expert's gate, up and down projections; empty if checkpoints only have stacked tensors.
        stacked: tensors [E, out, in] with gate and up projections and with down projections. With `parts` these are the
            names in checkpoints that are not quantised.
        shared: shared experts' gate, up and down projections.
        shared_gate: projection to the shared experts' weight.
        router_bias: terms that are added to scores when experts are chosen.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, ...] = ()
    shared: tuple[str, str, str] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    shared_gate: str | None = None
    router_bias: str | None = None


class Rows(NamedTuple):
    """Builder of ParamSpecs for the tensors in a layer, or outside the layers.

    Attributes:
        path: the layer's keys in the parameter tree.
        prefix: prefix in checkpoints.
        norm_init: initial norm weights.
        transposed: True if checkpoints have matrices as [in, out].
    """

    path: tuple[str | int, ...]
    prefix: str
    norm_init: str = "ones"
    transposed: bool = False

    def tensor(
        self,
        name: str,
        axes: tuple[str | None, ...],
        hf_names: Sequence[str],
        sizes: Sequence[int],
        *inner: int,
        **fields: Any,
    ) -> ParamSpec:
        """Return the ParamSpec for a tensor [sum(sizes), *inner].

        Args:
            name: key in the parameter tree.
            axes: logical axis of each dimension.
            hf_names: checkpoint tensors without the prefix, one for each size; a fused tensor is repeated.
            sizes: rows from each checkpoint tensor.
            inner: sizes of the other dimensions.
            fields: other `ParamSpec` fields.
        """
        names = tuple(f"{self.prefix}{hf_name}" for hf_name in hf_names)
        return ParamSpec((*self.path, name), (sum(sizes), *inner), axes, names, tuple(sizes), **fields)

    def matrix(
        self,
        name: str,
        axes: tuple[str | None, str | None],
        modules: Sequence[str],
        sizes: Sequence[int],
        inner: int,
        **fields: Any,
    ) -> ParamSpec:
        """Return the ParamSpec for a matrix [sum(sizes), inner], from the weights of `modules`; see `tensor`."""
        hf_names, fields = [f"{module}.weight" for module in modules], {"transposed": self.transposed, **fields}
        return self.tensor(name, axes, hf_names, sizes, inner, **fields)

    def vector(
        self, name: str, axis: str | None, hf_names: Sequence[str], sizes: Sequence[int], init: str, **fields: Any
    ) -> ParamSpec:
        """Return the ParamSpec for a vector [sum(sizes)] with its initial value; see `tensor`."""
        return self.tensor(name, (axis,), hf_names, sizes, init=init, **fields)

    def norm(self, name: str, hf_name: str | None, size: int, parts: Collection[str] = ()) -> list[ParamSpec]:
        """Return the ParamSpecs for a norm over `size` elements.

        Args:
            name: key in the parameter tree.
            hf_name: checkpoint module; None if the family lacks the norm.
            size: number of elements.
            parts: "weight" and perhaps "bias" for a tree with these; empty for an array.
        """
        if hf_name is None:
            return []
        if not parts:
            return [self.vector(name, None, [f"{hf_name}.weight"], [size], self.norm_init)]
        inits, rows = {"weight": self.norm_init, "bias": "zeros"}, self._replace(path=(*self.path, name))
        return [rows.vector(part, None, [f"{hf_name}.{part}"], [size], inits[part]) for part in parts]

    def head_norm(self, name: str, hf_name: str, num_heads: int, head_dim: int, kind: QkNorm) -> ParamSpec:
        """Return the ParamSpec for a query or key norm.

        Args:
            name: key in the parameter tree.
            hf_name: checkpoint module.
            num_heads: query or KV heads.
            head_dim: elements per head.
            kind: see `AttentionSpec.qk_norm`.
        """
        if kind == "shared":
            return self.vector(name, None, [f"{hf_name}.weight"], [head_dim], self.norm_init)
        if kind == "whole":
            names, sizes = [f"{hf_name}.weight"], [num_heads * head_dim]
            return self.vector(name, "heads", names, sizes, self.norm_init, heads=(num_heads,))
        fields: dict[str, Any] = {"init": self.norm_init, "transposed": False}
        return self.matrix(name, ("heads", None), [hf_name], [num_heads], head_dim, heads=(num_heads,), **fields)


_SHARED = "mlp.shared_expert"
GATED_SHARED = MoeNames(
    shared=(f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj", f"{_SHARED}.down_proj"), shared_gate=f"{_SHARED}_gate"
)
LayerTensors = Callable[[Rows, LayerSpec, ArchConfig], list[ParamSpec]]


@dataclass(frozen=True)
class TensorNames:
    """A family's tensors in checkpoints: names and layouts.

    A name in a layer has no prefix; None if the family lacks the tensor. A fused tensor is named once per part.

    Attributes:
        embed: embedding.
        positions: learned position embeddings.
        final_norm: norm after the layers.
        head: output projection.
        layers: prefix.
        input_norm: norm before attention.
        qkv: projections to queries, keys and values; one name if each head has its three next to each other.
        out: attention output projection.
        q_norm: query norm.
        k_norm: key norm.
        sinks: attention sinks.
        attention_post_norm: attention post-norm.
        mlp_norm: norm before the MLP.
        gate_up: MLP gate and up projections; one name without a gate.
        down: MLP down projection.
        mlp_post_norm: MLP post-norm.
        norm_parts: "weight" and perhaps "bias", if norms other than post-norms are trees; empty for arrays.
        norm_init: initial norm weights.
        transposed: True if matrices in layers are [in, out].
        head_bias: True if the output projection has a bias.
        moe: names in MoE layers, or a function that returns such a layer's rows.
        mixer: function that returns the mixer's rows in recurrent layers and MLA layers.
        more: function that returns a layer's rows that only this family has.
        tables: function that returns the rows outside the layers that only this family has.
    """

    embed: str = "model.embed_tokens"
    positions: str | None = None
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    input_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str | None = None
    norm_parts: tuple[str, ...] = ()
    norm_init: str = "ones"
    transposed: bool = False
    head_bias: bool = False
    moe: MoeNames | LayerTensors = MoeNames()
    mixer: LayerTensors | None = None
    more: LayerTensors = lambda *_: []
    tables: Callable[[ArchConfig], list[ParamSpec]] = lambda _: []


LLAMA = TensorNames()


def decoder_specs(arch: ArchConfig, names: TensorNames) -> list[ParamSpec]:
    """Return one ParamSpec per tensor in a model.

    Args:
        arch: the model.
        names: the family's tensors in checkpoints.
    """
    D, V = arch.hidden_size, arch.vocab_size
    top, stage, specs = Rows((), "", names.norm_init), arch.stage, list[ParamSpec]()
    if stage.is_first or (stage.is_last and arch.tied_embeddings and arch.pooler is None):
        specs.append(top.matrix("embed", ("vocab", "embed"), [names.embed], [V], D))
    if names.positions is not None and stage.is_first:
        specs.append(top.matrix(POSITION_EMBED, (None, "embed"), [names.positions], [arch.max_position], D))
    for index, layer in enumerate(arch.layers):
        prefix = f"{names.layers}.{stage.first_layer + index}."
        rows = Rows(("layers", index), prefix, names.norm_init, names.transposed)
        norms = {"input_norm": names.input_norm, "mlp_norm": names.mlp_norm}
        for name, hf_name in norms.items():
            specs += rows.norm(name, hf_name, D, names.norm_parts)
        if names.mixer is not None and (layer.state or layer.attention.mla):
            specs += names.mixer(rows, layer, arch)
        else:
            specs += _attention_specs(rows, layer.attention, names, D)
        if layer.mlp is not None:
            specs += _mlp_specs(rows, layer.mlp, names, D)
        if layer.experts is not None:
            moe = names.moe
            specs += _moe_specs(rows, layer.experts, moe, arch) if isinstance(moe, MoeNames) else moe(rows, layer, arch)
        specs += rows.norm("attention_post_norm", names.attention_post_norm, D)
        specs += rows.norm("mlp_post_norm", names.mlp_post_norm, D)
        specs += names.more(rows, layer, arch)
    specs += top.norm("final_norm", names.final_norm, D, names.norm_parts)  # has the model's dtype on all stages
    if not stage.is_last:
        return specs
    if not arch.tied_embeddings:
        specs.append(top.matrix("lm_head", ("vocab", "embed"), [names.head], [V], D))
    if names.head_bias and arch.pooler is None:
        specs.append(top.vector("lm_head_bias", "vocab", [f"{names.head}.bias"], [V], "zeros"))
    return specs + names.tables(arch)


def _attention_specs(rows: Rows, attention: AttentionSpec, names: TensorNames, D: int) -> list[ParamSpec]:
    """Return the ParamSpecs for a layer's attention, without the norm before it; D is the hidden size."""
    Q, K, H = attention.num_heads, attention.num_kv_heads, attention.head_dim
    hf_names = names.qkv
    heads: tuple[int, ...] = (Q, K, K)
    sizes = [Q * H * (2 if attention.has_gate else 1), K * H, K * H]
    unread: tuple[str, ...] = ()
    if len(hf_names) == 1:
        sizes, heads = [sum(sizes)], (Q,)
    elif attention.kv_source is not None:
        unread = tuple(f"{rows.prefix}{name}.weight" for name in (*hf_names[1:], names.k_norm))
    count = 1 if attention.kv_source is not None else 2 if attention.k_eq_v else 3
    hf_names, sizes, heads = hf_names[:count], sizes[:count], heads[:count]
    specs = [
        rows.matrix("qkv_proj", ("heads", "embed"), hf_names, sizes, D, heads=heads, unread=unread),
        rows.matrix("o_proj", ("embed", "heads"), [names.out], [D], Q * H),
    ]
    if attention.qkv_bias:
        biases = [f"{name}.bias" for name in hf_names]
        specs.append(rows.vector("qkv_bias", "heads", biases, sizes, "zeros", heads=heads, unread=unread))
    if attention.o_bias:
        specs.append(rows.vector("o_bias", "embed", [f"{names.out}.bias"], [D], "zeros"))
    if names.sinks is not None:
        specs.append(rows.vector("sinks", "heads", [names.sinks], [Q], "zeros", heads=(Q,)))
    if attention.qk_norm:
        normed = {"q_norm": (names.q_norm, Q), "k_norm": (names.k_norm, K)}
        for name, (hf_name, num_heads) in [*normed.items()][:count]:
            specs.append(rows.head_norm(name, hf_name, num_heads, H, attention.qk_norm))
    return specs


def _mlp_specs(rows: Rows, mlp: MlpSpec, names: TensorNames, D: int) -> list[ParamSpec]:
    """Return the ParamSpecs for a layer's MLP, without the norm before it; D is the hidden size."""
    name, F, gate_up = "gate_up" if len(names.gate_up) > 1 else "up", mlp.ffn_size, names.gate_up
    sizes, is_swiglu = [F] * len(gate_up), mlp.activation == "swiglu"
    specs = [
        rows.matrix(f"{name}_proj", ("ffn", "embed"), gate_up, sizes, D, gated=is_swiglu),
        rows.matrix("down_proj", ("embed", "ffn"), [names.down], [D], F),
    ]
    if mlp.bias:
        specs.append(rows.vector(f"{name}_bias", "ffn", [f"{part}.bias" for part in gate_up], sizes, "zeros"))
        specs.append(rows.vector("down_bias", "embed", [f"{names.down}.bias"], [D], "zeros"))
    return specs


def _moe_specs(rows: Rows, experts: Experts, names: MoeNames, arch: ArchConfig) -> list[ParamSpec]:
    """Return the ParamSpecs for a layer's router, experts and shared experts."""
    D, E, F, S = arch.hidden_size, experts.num_experts, experts.ffn_size, experts.shared_ffn_size
    specs = [rows.matrix("router", (None, "embed"), [names.router], [E], D, exact=True)]
    parts = {"experts_gate_up": names.parts[:2], "experts_down": names.parts[2:]}
    axes = {"experts_gate_up": ("expert_rows", "embed"), "experts_down": ("expert", "expert_ffn")}
    sizes = {"experts_gate_up": [F, F], "experts_down": [D]}
    for index, name in enumerate(parts):
        each = [f"{names.experts}.{expert}.{part}.weight" for expert in range(experts.num_held) for part in parts[name]]
        is_stacked = bool(names.stacked) and (not each or not _is_quantised(f"{rows.prefix}{each[0]}", arch))
        counts = sizes[name] * experts.num_held
        hf_names = [names.stacked[index]] * len(counts) if is_stacked else each
        inner = D if name == "experts_gate_up" else F
        gated = name == "experts_gate_up" and experts.activation is swiglu
        fields: dict[str, Any] = {"gated": gated, "experts": experts, "stacked": is_stacked}
        specs.append(rows.tensor(name, axes[name], hf_names, counts, inner, **fields))
    if S:
        gate, up, down = names.shared
        specs.append(rows.matrix("shared_gate_up", ("ffn", "embed"), [gate, up], [S, S], D, gated=True))
        specs.append(rows.matrix("shared_down", ("embed", "ffn"), [down], [D], S))
    if names.shared_gate is not None:
        specs.append(rows.matrix("shared_gate", (None, "embed"), [names.shared_gate], [1], D, exact=True))
    if names.router_bias is not None:
        specs.append(rows.vector("router_bias", None, [names.router_bias], [E], "zeros", exact=True))
    return specs


def _is_quantised(hf_name: str, arch: ArchConfig) -> bool:
    """Return whether the checkpoint tensor is quantised."""
    return arch.schemes is not None and arch.schemes.for_tensor(hf_name) is not None

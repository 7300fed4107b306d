"""Parameters with LoRA adapters: matrices that add the adapters' terms, and the program that writes an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Int

from jaxserve.layers.adapted_experts import ExpertFactors
from jaxserve.layers.adapted_tables import ReplacedMatrix, RetokenizedMatrix
from jaxserve.layers.adapters import Factors, write_slot
from jaxserve.layers.sharding import MeshAxes, split_axes
from jaxserve.models.adapted_specs import EMBED, HEAD
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.adapter_norms import scaled
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ScannedLayers

MatrixFactors = Factors | ExpertFactors
Layer = Callable[[Params, Mapping[str, MatrixFactors]], Params]


def with_adapters(params: Params, adapters: Params | None) -> Params:
    """Return parameters whose matrices add the terms of adapters; unchanged without adapters.

    Args:
        params: the model's parameters.
        adapters: stacks, as from `AdapterLayout.new`.
    """
    if adapters is None:
        return params

    def wrap(p: Params, own: Mapping[str, MatrixFactors]) -> Params:
        return {**p, **{name: factors.adapted(p[name]) for name, factors in own.items()}}

    wrapped, whole, tokens = _tables(params), adapters.get("whole", {}), adapters.get("tokens", {})
    tables = {name for name in wrapped if name in adapters or name in whole or name in tokens}
    wrapped |= {name: ReplacedMatrix(wrapped[name], own) for name, own in whole.items()}
    wrapped |= {name: RetokenizedMatrix(wrapped[name], own) for name, own in tokens.items()}
    wrapped |= {name: adapters[name].adapted(wrapped[name]) for name in tables if name in adapters}
    layers = _map_layers(wrap, wrap, params["layers"], adapters["layers"])
    return {**params, **{name: wrapped[name] for name in tables}, "layers": layers}


def make_set_adapter(
    layout: AdapterLayout, arch: ArchConfig, mesh: Mesh | None
) -> Callable[[Params, Int[Array, ""], Params, Params], Params]:
    """Return the program that writes an adapter.

    It takes donated stacks, an index in them, the adapter's arrays, as from `AdapterLayout.place`, and the model's
    parameters, which are empty unless `layout.reads_weights`. It returns the stacks.

    Args:
        layout: layout of the stacks.
        arch: sizes of the whole model.
        mesh: devices over which the model is split; None for one device.
    """
    specs = [each.spec for each in layout.specs(arch, arch)]
    axes: dict[str, MeshAxes | None] = {
        str(spec.path[-1]): split_axes(spec.axes) for spec in specs if mesh is not None and spec.split_dimension == 1
    }

    def set_adapter(stacks: Params, slot: Int[Array, ""], new: Params, params: Params) -> Params:
        new = _with_scales(new, params, axes) if layout.reads_weights else new
        layers, own = stacks["layers"], new["layers"]
        if not isinstance(layers, ScannedLayers):
            return cast("Params", write_slot(stacks, slot, new))
        periodic = write_slot(layers.periodic, slot, own.periodic, axis=1)
        listed = {**stacks, "layers": (layers.rest, layers.first)}
        written = write_slot(listed, slot, {**new, "layers": (own.rest, own.first)})
        rest, first = written["layers"]
        return {**written, "layers": ScannedLayers(periodic, rest, first)}

    return set_adapter


def _with_scales(new: Params, params: Params, axes: Mapping[str, MeshAxes | None]) -> Params:
    """Return an adapter's arrays with factors on outputs in place of magnitudes; see `adapter_norms`.

    Args:
        new: the arrays.
        params: the model's parameters.
        axes: mesh axes along which each device has some columns, by matrix name.
    """

    def scale(p: Params, own: Mapping[str, MatrixFactors]) -> Params:
        return {
            name: scaled(factors, p[name], axes.get(name), is_table=name in EMBED)
            if isinstance(factors, Factors) and factors.scale is not None
            else factors
            for name, factors in own.items()
        }

    def scale_stacked(p: Params, own: Mapping[str, MatrixFactors]) -> Params:
        stacked = {name: p[name] for name in own}
        return cast("Params", lax.map(lambda both: scale(*both), (stacked, own)))

    layers = _map_layers(scale, scale_stacked, params["layers"], new["layers"])
    tables = scale(_tables(params), {name: new[name] for name in (*EMBED, *HEAD) if name in new})
    return new | {"layers": layers} | tables


def _tables(params: Params) -> Params:
    """Return embedding and output projection, which may be the same matrix; none in pipeline stages without both."""
    ([embed], [head]) = EMBED, HEAD
    return {} if embed not in params else {embed: params[embed], head: params.get(head, params[embed])}


def _map_layers(change: Layer, change_stacked: Layer, layers: Any, adapters: Any) -> Any:
    """Return layers, listed or stacked for a scan, changed by a function of a layer's parameters and adapters.

    Args:
        change: the function.
        change_stacked: the function for stacked layers.
        layers: the parameters.
        adapters: the adapters.
    """
    if not isinstance(layers, ScannedLayers):
        return [change(p, own) for p, own in zip(layers, adapters, strict=True)]
    functions = change_stacked, change, change
    periodic, rest, first = (
        [function(p, own) for p, own in zip(*both, strict=True)]
        for function, *both in zip(functions, layers, adapters, strict=True)
    )
    return ScannedLayers(tuple(periodic), rest, first)

"""Weights in the programs' dtype and layout, on all devices."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.execution.xla_cache import cache_scope
from jaxserve.layers.sharding import named_sharding, replica_meshes, replicated
from jaxserve.layers.weight_formats import packed, plain, weight_format
from jaxserve.layers.weight_formats.stored import StoredFormat
from jaxserve.layers.weight_formats.weight_format import FormatChoice
from jaxserve.models import decoder, registry
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import VISION, Params, ParamSpec, matrix_transform, stack_layers
from jaxserve.models.vision import tower
from jaxserve.weights.rows import Shardings

logger = logging.getLogger(__name__)

Weights = Mapping[str, Any] | str | os.PathLike[str]  # weights accepted by a running engine


def build_params(config: EngineConfig, arch: ArchConfig) -> Params:
    """Load the first replica's weights in the serving dtype; see `build_stages`."""
    [params] = build_stages(config, arch, [arch])
    return params


def build_stages(config: EngineConfig, arch: ArchConfig, stages: Sequence[ArchConfig]) -> list[Params]:
    """Load the first replica's weights in the serving dtype, for each of its pipeline stages.

    They are split over its devices, quantised, packed for a CPU, and stacked for a scan, as configured.

    Args:
        config: engine options.
        arch: sizes of the whole model.
        stages: the stages' sizes; `[arch]` for a single one.
    """
    dtype = compute_dtype(config, arch).name
    if config.dtype == "auto" and arch.dtype == "float32" != dtype:
        logger.warning('the float32 checkpoint is served in %s; pass dtype="float32" to keep its precision', dtype)
    if arch.schemes is not None:
        logger.info(_description(config, arch, arch.schemes))
    _check_activations(config, arch)
    return _make_stages(config, arch, stages, partial(weights.load, config.model_path, use_tqdm=True))


def _check_activations(config: EngineConfig, arch: ArchConfig) -> None:
    """Raise ConfigError if `activation_quantization` is requested and rounds no matmul's inputs."""
    if config.activation_quantization is None:
        return
    requested = f"activation_quantization={config.activation_quantization!r}"
    form = _format(config, arch)
    if (reason := not_packed(config, form, matrix_dtype(config, arch))) is not None:
        raise ConfigError(f"{requested} needs the native CPU kernels, but {reason}; drop it")
    formats = [each for spec in registry.param_specs(arch) if (each := form.at(spec)) is not None]
    rounded = [each for each in formats if each.rounds_inputs]
    if not rounded:
        raise ConfigError(
            f'{requested} needs integer weights, got {storage_name(config, arch)}; pass quantization="int8" or "int4" '
            "too, or drop it"
        )
    logger.info("the inputs of %d matrices are rounded to %s", len(rounded), config.activation_quantization)


def _format(config: EngineConfig, arch: ArchConfig) -> FormatChoice:
    """Return the weight format that the options and the checkpoint specify."""
    return weight_format(config.quantization, arch.schemes, config.activation_quantization)


def _description(config: EngineConfig, arch: ArchConfig, schemes: weights.Schemes) -> str:
    """Return a log line about a quantised checkpoint: its formats, and the kernels for its matmuls."""
    form = StoredFormat(schemes)
    matrices = [spec for spec in registry.param_specs(arch) if spec.is_matrix]
    formats = [each for spec in matrices if (each := form.at(spec)) is not None]
    counts, plain = Counter(str(each.scheme) for each in formats), len(matrices) - len(formats)
    found = "; ".join(f"{count} matrices {scheme}" for scheme, count in counts.items()) or "no quantised matrices"
    dtype = matrix_dtype(config, arch)
    num_native = sum(not_packed(config, each, dtype) is None for each in formats)
    num_dequantised = sum(map(form.is_dequantised, matrices))
    others = f"{plain} matrices are not quantised"
    if num_dequantised:
        others = f"{num_dequantised} matrices are dequantised as they are read, {plain - num_dequantised} not quantised"
    has_kernels = jax.default_backend() != "cpu" and config.linear_backend == "auto"
    path = f"dequantised in products by {'a Pallas kernel or ' * has_kernels}XLA"
    if num_native == len(formats):
        path = "multiplied by the native kernels"
    elif num_native:
        path = f"{num_native} are multiplied by the native kernels, the others {path}"
    if config.quantization is not None:
        path = f"quantised again to {config.quantization}"
    parts = [found, others, *([path] if formats or config.quantization else ())]
    if schemes.kv_cache:
        parts.append("its scales of keys and values are not used, as the pool has a scale for every token and head")
    return f"{schemes.method} checkpoint: {'; '.join(parts)}"


def prepare_params(
    config: EngineConfig, arch: ArchConfig, given: Weights, stages: Sequence[ArchConfig], current: Sequence[Params]
) -> Callable[[], list[Params]]:
    """Return a function that creates the first replica's new weights from `given` ones, in the layout of `current`.

    Arrays are converted before this returns. A directory is checked now, but read only by the function.

    Args:
        config: options of the engine.
        arch: model sizes.
        given: argument of `LLM.update_weights`.
        stages: sizes of the pipeline stages.
        current: the weights of the first replica's stages, or their shapes, dtypes and shardings.

    Raises:
        ConfigError: they do not fit the model.
    """
    if isinstance(given, str | os.PathLike):
        with registry.config_errors():
            # Otherwise tensors with the same names and shapes could mean other matrices.
            if weights.has_config(given) and weights.read_schemes(weights.read_config(given)) != arch.schemes:
                raise ConfigError(
                    "weights must be quantised as those in use, got another quantization_config; make an engine for "
                    "them"
                )
            weights.check(given, registry.param_specs(arch), arch.schemes)
        return partial(_make_stages, config, arch, stages, partial(weights.load, given))
    if not isinstance(given, Mapping):
        raise ConfigError(f"weights must be a path, or arrays in a tree or by name, got {type(given).__name__}")
    arrays: dict[str, Any] = jax.tree.map_with_path(_array_at, dict(given))
    same_form = bool(jax.tree.structure([arrays]) == jax.tree.structure([*current]))  # type: ignore[operator]  # a gap of jax's stubs
    if same_form:
        new = [_placed_as(arrays, current[0])]
    else:
        new = _make_stages(config, arch, stages, partial(weights.assemble, arrays))
    return lambda: new


def _array_at(path: jax.tree_util.KeyPath, value: Any) -> Any:
    """Return a given leaf as a numpy or jax array; ConfigError names a leaf that is no array."""
    array = weights.from_torch(value)
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        name = jax.tree_util.keystr(path)
        raise ConfigError(f"weights must be arrays of numpy, jax or torch, got {type(array).__name__} at {name}")
    return array


def _placed_as(given: Mapping[str, Any], current: Params) -> Params:
    """Put arrays on devices with the shardings of `current`; arrays that have them already are not copied.

    Raises:
        ConfigError: a shape or dtype differs.
    """
    wrong = [
        f"{jax.tree_util.keystr(path)} {new.dtype}{list(new.shape)} instead of {old.dtype}{list(old.shape)}"
        for (path, new), old in zip(jax.tree.leaves_with_path(given), jax.tree.leaves(current), strict=True)
        if (new.shape, new.dtype) != (old.shape, old.dtype)
    ]
    if wrong:
        raise ConfigError(f"weights must have the shapes and dtypes of those in use, got {', '.join(wrong[:8])}")
    placed: Params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), given, current)
    return placed


def build_layer_params(
    config: EngineConfig, arch: ArchConfig, specs: Sequence[ParamSpec], directory: str | os.PathLike[str], prefix: str
) -> Params:
    """Load one more layer for the first replica's last stage, in the layout that the others have.

    Args:
        config: engine options.
        arch: model sizes with only this layer.
        specs: the layer's tensor specs.
        directory: checkpoint that contains the layer.
        prefix: tensor name prefix.
    """
    make = partial(weights.load, directory, prefix=prefix)
    return _make_params(config, arch, make, specs, specs, build_meshes(config)[config.pipeline_parallel_size - 1])


def build_embedding(config: EngineConfig, arch: ArchConfig) -> Params:
    """Load the model's embedding, whole on each device of the first replica's last stage."""
    specs = registry.param_specs(arch)
    rows = [spec for spec in specs if spec.path == ("embed",)]
    params = _read_params(config, arch, partial(weights.load, config.model_path), specs, rows, None)
    return on_every_device(params, build_meshes(config)[config.pipeline_parallel_size - 1])


def _make_stages(
    config: EngineConfig, arch: ArchConfig, stages: Sequence[ArchConfig], make: Callable[..., Params]
) -> list[Params]:
    """Make the parameters of the first replica's pipeline stages; see `_make_params`."""
    specs = registry.param_specs(arch)
    return [
        _make_params(config, stage, make, specs, registry.param_specs(stage), mesh)
        for stage, mesh in zip(stages, build_meshes(config)[: len(stages)], strict=True)
    ]


def _make_params(
    config: EngineConfig,
    arch: ArchConfig,
    make: Callable[..., Params],
    specs: Sequence[ParamSpec],
    rows: Sequence[ParamSpec],
    mesh: Mesh | None,
) -> Params:
    """Make parameters as the programs take them: as `_read_params` does, and stacked."""
    return stacked_if_scanned(_read_params(config, arch, make, specs, rows, mesh), arch)


def _read_params(
    config: EngineConfig,
    arch: ArchConfig,
    make: Callable[..., Params],
    specs: Sequence[ParamSpec],
    rows: Sequence[ParamSpec],
    mesh: Mesh | None,
) -> Params:
    """Read parameters: quantised, packed and sharded over a mesh.

    Args:
        config: engine options.
        arch: sizes of the model or pipeline stage.
        make: function that reads them, such as `weights.load` with its source.
        specs: tensors in the source.
        rows: those of them to read.
        mesh: devices over which they are split; None for the first device.

    Raises:
        ConfigError: the checkpoint does not fit the model.
    """
    dtype = compute_dtype(config, arch)
    form, matrices = _format(config, arch), matrix_dtype(config, arch)
    if (reason := not_packed(config, form, matrices)) is not None:
        logger.info("the native kernels do not multiply matrices: %s", reason)
    transform = matrix_transform(specs, form, native=reason is None, matrix_dtype=matrices)
    with registry.config_errors(), cache_scope(config)():  # quantisation is compiled too
        return make(specs, dtype, _shardings(mesh, rows), transform, schemes=arch.schemes, rows=rows)


def stacked_if_scanned(params: Params, arch: ArchConfig) -> Params:
    """Return the parameters as the model's programs take them.

    On TPUs the layers are stacked along a leading axis if `lax.scan` can run over them, and a vision tower's layers
    likewise; otherwise nothing changes.
    """
    if jax.default_backend() != "tpu":
        return params
    if arch.tower is not None:
        params[VISION] = tower.stacked(params[VISION], arch.tower)
    return stack_layers(params, arch.period, num_first=arch.num_first_layers) if decoder.can_scan(arch) else params


def _shardings(mesh: Mesh | None, specs: Sequence[ParamSpec]) -> Shardings | None:
    """Return a function from parameter path to sharding over `mesh`; None for one device."""
    if mesh is None:
        return None
    return {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__


def compute_dtype(config: EngineConfig, arch: ArchConfig, *, on_cpu: bool | None = None) -> jnp.dtype:
    """Return the dtype for activations, and for all weights without `matrix_dtype`.

    By default float32 on a CPU and the checkpoint's dtype on accelerators, except that float32 checkpoints are served
    in bfloat16, as in vLLM: float32 would take twice the memory at a fraction of the speed.

    Args:
        config: engine options.
        arch: the model.
        on_cpu: True for a model that runs on a CPU; by default this process's platform.
    """
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
    return jnp.dtype("float32" if on_cpu else "bfloat16" if arch.dtype == "float32" else arch.dtype)


def matrix_dtype(config: EngineConfig, arch: ArchConfig, *, on_cpu: bool | None = None) -> jnp.dtype:
    """Return the dtype for unquantised matrices.

    By default it is the activation dtype, but a CPU keeps 16-bit matrices, which its native kernels convert while
    streaming: the same values in half the bytes.

    Args:
        config: engine options.
        arch: the model.
        on_cpu: see `compute_dtype`.
    """
    dtype = compute_dtype(config, arch, on_cpu=on_cpu)
    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
    if config.dtype != "auto" or not on_cpu:
        return dtype
    reason = not_packed(config, weight_format(config.quantization), arch.dtype, "cpu")
    return jnp.dtype(arch.dtype) if reason is None else dtype  # XLA would convert whole matrices at every step


def not_packed(
    config: EngineConfig, form: FormatChoice, dtype: jax.typing.DTypeLike, platform: str | None = None
) -> str | None:
    """Return the reason why matrices are not packed for the native kernels, or None; see `packed.unsupported`."""
    if config.linear_backend != "auto":
        return f"linear_backend={config.linear_backend!r} leaves them to XLA"
    return packed.unsupported(form, dtype, platform)


def adapter_layout(config: EngineConfig, arch: ArchConfig, *, platform: str | None = None) -> AdapterLayout | None:
    """Return the layout of LoRA adapters on the devices; None if the engine serves none.

    Args:
        config: engine options.
        arch: the model.
        platform: platform of the devices; by default this process's.
    """
    if not config.enable_lora:
        return None
    platform = platform or jax.default_backend()
    dtype = matrix_dtype(config, arch, on_cpu=platform == "cpu")
    return AdapterLayout(
        config.max_loras,
        config.max_lora_rank,
        dtype=dtype.name,
        is_native=not_packed(config, plain.FORMAT, dtype, platform) is None,
        is_scanned=platform == "tpu" and decoder.can_scan(arch),
        extras=tuple(config.lora_extras),
    )


def storage_name(config: EngineConfig, arch: ArchConfig, *, on_cpu: bool | None = None) -> str:
    """Return the matrices' storage format on devices: a quantisation format or a dtype.

    Args:
        config: engine options.
        arch: model sizes.
        on_cpu: see `compute_dtype`.
    """
    if config.quantization is not None or arch.schemes is None:
        return config.quantization or matrix_dtype(config, arch, on_cpu=on_cpu).name
    formats = map(StoredFormat(arch.schemes).at, registry.param_specs(arch))
    elements = sorted({each.scheme.elements for each in formats if each is not None})
    return (
        f"{arch.schemes.method} ({', '.join(elements)})" if elements else matrix_dtype(config, arch, on_cpu=on_cpu).name
    )


def build_meshes(config: EngineConfig) -> list[Mesh | None]:
    """Return one mesh per replica and pipeline stage, stages first; None for a single one on one device."""
    sizes = config.tensor_parallel_size, config.data_parallel_size, config.expert_parallel_size
    return replica_meshes(*sizes, config.num_data_shards, config.pipeline_parallel_size)


def copies(params: Params, meshes: Sequence[Mesh | None]) -> list[Params]:
    """Return the first replica's weights, and copies on the other replicas' devices."""

    def copy(mesh: Mesh) -> Params:
        copied: Params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)), params)
        return copied

    return [params, *(copy(mesh) for mesh in meshes[1:] if mesh is not None)]


def on_every_device(params: Params, mesh: Mesh | None) -> Params:
    """Return parameters replicated on every device in a mesh; unchanged without one."""
    placed: Params = params if mesh is None else jax.device_put(params, replicated(mesh))
    return placed

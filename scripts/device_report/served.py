"""Engines with random weights that are never written to disk."""

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device_report.kernels import KERNELS
from jaxserve import weights
from jaxserve.api.config import MAX_STEPS, EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.generation_defaults import build_arch
from jaxserve.assembly.memory import build_schedule
from jaxserve.assembly.parameters import compute_dtype, stacked_if_scanned
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.programs import Programs
from jaxserve.execution.runner import Runner, array_shapes
from jaxserve.layers.sharding import tensor_mesh
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec, matrix_transform, split_array
from jaxserve.models.registry import num_params, param_specs
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from jaxserve.scheduling.step_plan import StepShape, cheapest
from jaxserve.weights.stored_tensor import StoredTensor

Shape = dict[str, Any]


class Served:
    """A model with the programs being measured, and its start-up costs.

    Args:
        device: "gpu" or "tpu"; its kernel is used if possible.
        shape: Llama config.json fields.
        std_factor: factor on the usual weight scale.
        options: EngineConfig options.
    """

    def __init__(self, device: str, shape: Shape, std_factor: float = 1, **options: Any) -> None:
        self._config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **shape}
        self._options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "compilation_cache_dir": None, **options}
        with TemporaryDirectory() as directory:
            config = self._engine_config(directory)
            arch = build_arch(config)
        started = time.perf_counter()
        mesh = tensor_mesh(config.tensor_parallel_size)
        devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
        params = _random_params(config, arch, std_factor)
        jax.block_until_ready(params)
        self.weights_s = time.perf_counter() - started
        dtype = compute_dtype(config, arch)
        local_arch = arch.local(config.tensor_parallel_size)
        sizes = local_arch.attention
        kernel, heads = KERNELS[device], Heads(sizes.num_kv_heads, sizes.head_dim)
        page_size = config.page_size or default_page_size(kernel.backend, heads, dtype)
        self.backend = kernel.served(Problem(heads, sizes.num_heads, page_size, dtype, jax.default_backend()))
        self.schedule = build_schedule(config, local_arch, dtype, self.backend, [(local_arch, devices)])
        self.num_params = num_params(arch)
        sizes = (arch, array_shapes(params), self.schedule, dtype, self.backend, "auto", MAX_STEPS, mesh)
        programs = Programs(Lowering(*sizes), directory=None, cache_scope=contextlib.nullcontext)
        self.runner = Runner(programs, params, {})
        self.compile_s: dict[str, float] = {}
        plain = [each for each in self.schedule.shapes(MAX_STEPS) if not (each.has_drafts or each.samples_late)]
        started = time.perf_counter()
        self._timed("writers", self.runner.programs._compile_writers)
        self._compile([plain[0], plain[-1]])
        self.first_programs_s = time.perf_counter() - started

    def compile_for(self, rows: Iterable[int], multi_step: bool) -> None:
        """Compile the programs for these numbers of decoding rows, and multi-step ones if possible."""
        shapes = self.schedule.shapes(MAX_STEPS)
        fitting = [cheapest(shapes, StepShape(count, least)) for count in rows for least in (1, 1 + multi_step)]
        self._compile(dict.fromkeys(shape for shape in fitting if shape))

    def _compile(self, wanted: Iterable[StepShape]) -> None:
        """Compile missing programs simultaneously; a program's seconds include the others' load."""
        compile_now, shapes = self.runner.programs._compile, list(wanted)
        with ThreadPoolExecutor(max(1, len(shapes))) as threads:
            list(threads.map(lambda shape: self._timed(shape.name, partial(compile_now, [shape])), shapes))

    def _timed(self, name: str, compile_it: Callable[[], None]) -> None:
        """Note the compile seconds if it was not compiled before."""
        started = time.perf_counter()
        compile_it()
        self.compile_s.setdefault(name, time.perf_counter() - started)

    @property
    def num_programs(self) -> int:
        """Number of programs that an engine with these sizes compiles."""
        return self.schedule.num_programs(MAX_STEPS)

    def engine(self, **options: Any) -> DrivenEngine:
        """Return a new engine over these weights, programs and pool; only one may be in use at a time."""
        with TemporaryDirectory() as directory:
            return DrivenEngine(self._engine_config(directory, **options), [self.runner])

    def _engine_config(self, directory: str, **options: Any) -> EngineConfig:
        (Path(directory) / "config.json").write_text(json.dumps(self._config))
        return EngineConfig(model=directory, **self._options | options)


def _random_params(config: EngineConfig, arch: ArchConfig, std_factor: float) -> Params:
    """Return random weights in an engine's layout.

    Quantised matrices with the same size are equal in all layers, because quantising on the host is slow; each has
    separate memory.
    """
    dtype, specs = compute_dtype(config, arch), param_specs(arch)
    mesh = tensor_mesh(config.tensor_parallel_size)
    quantized: dict[tuple[str | int, tuple[int, ...]], Any] = {}

    def transform(spec: ParamSpec, x: jax.Array) -> Any:
        x = x * std_factor if x.ndim > 1 and std_factor != 1 else x
        if config.quantization is None or not spec.is_matrix:
            return x if mesh is None else split_array(spec, x, mesh)
        key = spec.path[-1], spec.shape
        if key not in quantized:
            stored = StoredTensor([np.asarray(x)], np.dtype(dtype), None, readers)
            quantized[key] = convert(spec, stored)
        return jax.tree.map(jnp.copy, quantized[key])

    convert = matrix_transform(specs, weight_format(config.quantization))
    with ThreadPoolExecutor() as readers:
        params = weights.dummy(specs, 0, dtype, transform=transform)
    return stacked_if_scanned(params, arch)

"""Engines of random weights that are never written to a disk."""

import json
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from device_report.kernels import KERNELS
from jaxserve import weights
from jaxserve.config import MAX_STEPS, EngineConfig
from jaxserve.engine.checkpoint import build_arch
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import build_schedule
from jaxserve.engine.parameters import compute_dtype, stacked_if_scanned
from jaxserve.execution.programs import Buckets
from jaxserve.execution.runner import Runner
from jaxserve.models.params import split_array
from jaxserve.models.registry import num_params, param_specs
from jaxserve.pallas_kernels.ragged_paged_attention import default_page_size
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from jaxserve.sharding import tensor_mesh

Shape = dict[str, Any]


class Served:
    """A model of this shape with the programs that are measured, and what it took to start it.

    Args:
        device: "gpu" or "tpu"; its kernel attends where it can.
        shape: fields of a Llama's config.json.
        rows: numbers of rows that decode; each gets its program, and where several steps can go at once, theirs.
        std_factor: makes the weights this much larger than usual.
        options: options of EngineConfig.
    """

    def __init__(self, device: str, shape: Shape, rows: Iterable[int], std_factor: float = 1, **options: Any) -> None:
        self._config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **shape}
        self._options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "compilation_cache_dir": None, **options}
        with TemporaryDirectory() as directory:
            config = self._engine_config(directory)
            arch = build_arch(config)
        started = time.perf_counter()
        mesh = tensor_mesh(config.tensor_parallel_size)
        devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
        transform = None if mesh is None else partial(split_array, mesh=mesh)
        params = weights.dummy(param_specs(arch), 0, compute_dtype(config, arch), transform=transform)
        params = jax.tree.map(lambda x: x * std_factor if x.ndim > 1 and std_factor != 1 else x, params)
        params = stacked_if_scanned(params, arch)
        jax.block_until_ready(params)
        self.weights_s = time.perf_counter() - started
        dtype = compute_dtype(config, arch)
        local_arch = arch.local(config.tensor_parallel_size)
        heads = local_arch.num_heads, local_arch.num_kv_heads, arch.head_dim
        kernel, sizes = KERNELS[device], {"num_kv_heads": heads[1], "head_dim": heads[2]}
        page_size = config.page_size or default_page_size(kernel.backend, **sizes, kv_dtype=dtype)
        self.backend = kernel.served(Problem(*heads, page_size, dtype, jax.default_backend()))
        self.schedule = build_schedule(config, local_arch, dtype, self.backend, devices)
        self.num_params = num_params(arch)
        self.runner = Runner(
            arch,
            params,
            self.schedule,
            kv_dtype=dtype,
            backend=self.backend,
            max_steps=MAX_STEPS,
            mesh=mesh,
        )
        self.compile_s = self._compile(rows)

    def _compile(self, rows: Iterable[int]) -> dict[str, float]:
        """Seconds for each program; of all that an engine has, only those that are needed."""
        buckets, multi_steps = self.schedule.buckets(), self.schedule.multi_step_buckets(MAX_STEPS)
        seconds = {}
        started = time.perf_counter()
        programs = self.runner.programs
        programs._compile_writers()
        seconds["writers"] = time.perf_counter() - started
        wanted = [next(b for b in buckets if b >= num_rows) for num_rows in sorted(rows)]
        for bucket in dict.fromkeys([buckets[0], buckets[-1], *wanted]):
            started = time.perf_counter()
            self.runner.programs._compile(Buckets([bucket]))
            seconds[f"step {bucket}"] = time.perf_counter() - started
        for bucket in dict.fromkeys(bucket for bucket in wanted if bucket in multi_steps):
            started = time.perf_counter()
            self.runner.programs._compile(Buckets(multi_steps=[bucket]))
            seconds[f"multi-step {bucket}"] = time.perf_counter() - started
        return seconds

    @property
    def num_programs(self) -> int:
        """Number of programs that an engine with these sizes compiles."""
        return self.schedule.num_programs(MAX_STEPS)

    def engine(self, **options: Any) -> Engine:
        """A new engine over these weights, programs and pool; only one may be in use at a time."""
        with TemporaryDirectory() as directory:
            return Engine(self._engine_config(directory, **options), [self.runner])

    def _engine_config(self, directory: str, **options: Any) -> EngineConfig:
        (Path(directory) / "config.json").write_text(json.dumps(self._config))
        return EngineConfig(model=directory, **self._options | options)

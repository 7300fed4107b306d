"""Step compilation for chips that are not attached, and analysis of the compiled programs."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.execution.lowering import Lowering
from jaxserve.layers.sharding import named_sharding, tensor_mesh, whole_shape
from jaxserve.layers.weight_formats import packed, plain, weight_format
from jaxserve.models import decoder, registry
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import VISION, Params, ParamSpec, multiplied, stack_layers
from jaxserve.models.vision import tower
from jaxserve.pallas_kernels.deviceless import Chip, UnknownTopologyError
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.system.environment import leave_tpus_alone
from jaxserve.tools.planner.targets import Target
from jaxserve.weights.rows import build_tree

_COLLECTIVE = re.compile(
    r"= (\S.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(", re.MULTILINE
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_IN_LAYER = re.compile(r'op_name="[^"]*/(attention|mlp)/')  # named scopes in a block


@dataclass(frozen=True)
class Collective:
    """All collectives with the same type, such as "all-reduce", in a program or in one layer."""

    kind: str
    count: int
    num_bytes: int  # total result size on one device


@dataclass(frozen=True)
class StepProgram:
    """Resources that a step's program needs on one device.

    Attributes:
        num_tokens: token axis length.
        temp_bytes: size of temporaries and results other than the state.
        collectives: collectives per layer.
        estimate_ms: compiler's run time estimate, with each loop counted once, even over layers; None if unknown.
    """

    num_tokens: int
    temp_bytes: int
    collectives: tuple[Collective, ...]
    estimate_ms: float | None = None


@dataclass(frozen=True)
class StepCompiler:
    """Compiler for a target: lowers the engine's programs from shapes, without weights.

    Attributes:
        target: the chips.
        schedule: step and pool sizes.
        dtype: weight and activation dtype.
        kv_dtype: KV pool's dtype.
        backend: attention backend.
        quantization: weight quantisation.
        linear_backend: matmul backend, see `EngineConfig.linear_backend`.
        adapters: stacks of LoRA adapters; None without adapters.
    """

    target: Target
    schedule: ScheduleConfig
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    backend: str
    quantization: str | None = None
    linear_backend: str = "auto"
    adapters: AdapterLayout | None = None

    def step_programs(self, arch: ArchConfig, buckets: Sequence[int]) -> list[StepProgram]:
        """Compile a step for each number of tokens in `buckets`, and return the resources that each needs.

        Raises:
            ConfigError: they cannot be compiled.
        """
        num_copies = decoder.num_layer_copies(arch) if self._is_scanned(arch) else arch.num_layers
        programs = self.compile(arch, buckets)
        with self._refusals():
            texts = [program.as_text() or "" if self.target.num_devices > 1 else "" for program in programs]
        return [
            StepProgram(num_tokens, temp_bytes(program), layer_collectives(text, num_copies), estimate_ms(program))
            for num_tokens, program, text in zip(buckets, programs, texts, strict=True)
        ]

    def compile(self, arch: ArchConfig, buckets: Sequence[int]) -> list[jax.stages.Compiled]:
        """Compile and return a step for each number of tokens in `buckets`, with all layers of `arch`.

        Raises:
            ConfigError: they cannot be compiled.
        """
        with self._refusals():
            lowering = self._lowering(arch)
            return self._chip.compile_all([lowering.step(num_tokens) for num_tokens in buckets])

    def compile_times(self, arch: ArchConfig, max_steps: int) -> dict[str, float]:
        """Return the seconds to trace, lower and compile each engine program, with up to `max_steps` rounds per step.

        Raises:
            ConfigError: a program cannot be compiled.
        """
        with self._refusals():
            lowering = self._lowering(arch, max_steps)
            writers = lowering.writers()
            programs = {name: writers[name] for name in ("admit", "set_slot")}
            for shape in self.schedule.shapes(max_steps):
                programs |= lowering.programs(shape)
            return {name: self._seconds(lower) for name, lower in programs.items()}

    def _seconds(self, lower: Callable[[], jax.stages.Lowered]) -> float:
        """Return the seconds that it takes to lower a program and to compile it for the chip."""
        started = time.perf_counter()
        self._chip.compile_all([lower()])
        return time.perf_counter() - started

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn a compiler's errors within the context into ConfigErrors that name the target."""
        try:
            yield
        except (UnknownTopologyError, jax.errors.JaxRuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"steps cannot be compiled for {self.target.name}: {reason}") from error

    def _lowering(self, arch: ArchConfig, max_steps: int = 1) -> Lowering:
        """Return the object that lowers a model's programs for the target, with up to `max_steps` rounds per step."""
        leave_tpus_alone()
        num_devices, devices = self.target.num_devices, self._chip.devices(self.target.topology)
        num_expert_shards = 1 if arch.experts is None else arch.experts.num_shards
        shards = {"num_expert_shards": num_expert_shards, "num_data_shards": arch.num_data_shards}
        mesh = tensor_mesh(num_devices, devices, **shards)
        is_stacked = self._is_scanned(arch)
        params = abstract_params(arch, self.dtype, self.quantization, num_devices, mesh, is_stacked=is_stacked)
        sizes = self.schedule, self.kv_dtype, self.backend, self.linear_backend, max_steps, mesh
        return Lowering(arch, params, *sizes, chip=self._chip, adapters=self.adapters, encoder_dtype=self.dtype)

    def _is_scanned(self, arch: ArchConfig) -> bool:
        """Return whether steps loop over a model's layers, which are then stacked and compiled once."""
        return self._chip.platform == "tpu" and decoder.can_scan(arch)

    @property
    def _chip(self) -> Chip:
        """Chip that programs are compiled for."""
        assert self.target.sheet is not None, "there is nothing to compile for a CPU"
        return self.target.sheet.chip


def abstract_params(
    arch: ArchConfig,
    dtype: jnp.dtype,
    quantization: str | None = None,
    num_devices: int = 1,
    mesh: Mesh | None = None,
    *,
    is_stacked: bool = False,
    matrix_dtype: jnp.dtype | None = None,
    native: bool = False,
) -> Params:
    """Return the weights' shapes: one device's part, or, given a mesh, the whole with shardings.

    Unquantised matrices have `matrix_dtype`, by default `dtype`. With `native`, one device's matrices are packed for
    the native CPU kernels.
    """
    form, specs = weight_format(quantization, arch.schemes), registry.param_specs(arch)
    whole, is_multiplied = {spec.path: spec for spec in specs}, multiplied(specs)

    def tensor(spec: ParamSpec) -> Any:
        """Return a parameter's weight with shapes in place of arrays."""
        row_format = form.at(whole[spec.path]) or plain.FORMAT
        stored_dtype = spec.dtype(dtype, matrix_dtype) if row_format is plain.FORMAT else dtype
        if native and is_multiplied(spec) and row_format.native_dtype(stored_dtype) is not None:
            return packed.abstract(row_format, whole[spec.path].on_device(num_devices), spec.shape, stored_dtype)
        leaves = row_format.leaves(whole[spec.path], spec.shape, stored_dtype)
        return row_format.weight(*(_tensor(leaf.shape, leaf.dtype, leaf.axes, mesh) for leaf in leaves))

    params: Params = build_tree(registry.param_specs(arch.local(num_devices)), tensor)
    if is_stacked and arch.tower is not None:
        params[VISION] = tower.stacked(params[VISION], arch.tower, _stacked)
    return stack_layers(params, arch.period, _stacked, num_first=arch.num_first_layers) if is_stacked else params


def _stacked(*leaves: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of equal arrays stacked along a new first axis, which is not sharded."""
    first, sharding = leaves[0], leaves[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype, sharding=sharding)


def temp_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes on one device for temporaries and for results that do not reuse a donated buffer."""
    memory = program.memory_analysis()
    assert memory is not None, "the compilers for GPUs and TPUs report it"
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def collectives(program: str) -> tuple[Collective, ...]:
    """Return the collectives in a compiled program's text; branches and loops count once."""
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for result, kind, start in _COLLECTIVE.findall(program):
        sizes = [_array_bytes(*array) for array in _ARRAY.findall(result)]
        if start and kind != "all-reduce":
            sizes = sizes[len(sizes) // 2 :]  # results, listed after the operands
        counts[kind] += 1
        num_bytes[kind] += sum(sizes)
    return tuple(Collective(kind, counts[kind], num_bytes[kind]) for kind in sorted(counts))


def _array_bytes(kind: str, bits: str, sizes: str) -> int:
    """Return an array's size, given HLO's words for it: type, the type's bits, and sizes separated by commas."""
    return prod(int(size) for size in sizes.split(",") if size) * (8 if kind == "pred" else int(bits)) // 8


def layer_collectives(program: str, num_copies: int) -> tuple[Collective, ...]:
    """Return the collectives per layer from the text of a compiled program with `num_copies` unrolled layers.

    Counts are rounded means: some layers may have no experts.
    """
    in_layers = "\n".join(line for line in program.splitlines() if _IN_LAYER.search(line))
    return tuple(
        Collective(x.kind, max(1, round(x.count / num_copies)), x.num_bytes // num_copies)
        for x in collectives(in_layers)
    )


def estimate_ms(program: jax.stages.Compiled) -> float | None:
    """Return the compiler's run time estimate; None if there is none or it is negative."""
    seconds = (program.cost_analysis() or {}).get("optimal_seconds", 0)
    return seconds * 1e3 if seconds > 0 else None


def _tensor(
    part: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...], mesh: Mesh | None
) -> jax.ShapeDtypeStruct:
    """Return the shape of one device's part, or, given a mesh, the whole tensor's shape and sharding."""
    if mesh is None:
        return jax.ShapeDtypeStruct(part, dtype)
    return jax.ShapeDtypeStruct(whole_shape(mesh, part, axes), dtype, sharding=named_sharding(mesh, axes))

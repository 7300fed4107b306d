"""serve_step compiled for chips that are not there, and what its program tells."""

import dataclasses
import re
import time
from collections import Counter
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config import ScheduleConfig
from jaxserve.engine.batch import BatchLayout
from jaxserve.engine.step import abstract_state, make_serve_step
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, ParamSpec, build_tree
from jaxserve.sharding import named_sharding, over_devices, specs_of, tensor_mesh
from pallas_kernels.deviceless import Chip

_COLLECTIVE = re.compile(
    r"= (\S.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(", re.MULTILINE
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """All exchanges of one kind between devices."""

    kind: str
    count: int
    num_bytes: int  # of their results on one device, together


@dataclass(frozen=True)
class StepProgram:
    """What the program of a step takes on one chip.

    Attributes:
        num_tokens: of its token axis.
        temp_bytes: of temporaries, and of results other than the state.
        collectives: of one layer.
        compile_s: to trace and compile them here.
    """

    num_tokens: int
    temp_bytes: int
    collectives: tuple[Collective, ...]
    compile_s: float


@dataclass(frozen=True)
class StepCompiler:
    """Compiles steps from shapes alone.

    Attributes:
        chip: that they are for.
        num_chips: that the model is split over.
        schedule: sizes of steps and pool.
        dtype: of weights and activations.
        kv_dtype: of the pool.
        backend: of attention.
    """

    chip: Chip
    num_chips: int
    schedule: ScheduleConfig
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    backend: str

    def step_program(self, arch: ArchConfig, num_tokens: int) -> StepProgram:
        """What the step of one bucket takes. Where chips exchange, a second program tells which of it is a layer's."""
        started = time.perf_counter()
        program = self.compile(arch, num_tokens)
        exchanges = self._exchanges_per_layer(arch, program, num_tokens) if self.num_chips > 1 else ()
        return StepProgram(num_tokens, temp_bytes(program), exchanges, time.perf_counter() - started)

    def _exchanges_per_layer(
        self, arch: ArchConfig, program: jax.stages.Compiled, num_tokens: int
    ) -> tuple[Collective, ...]:
        other = _of_each_kind(arch, 1)
        if other.num_layers == arch.num_layers:
            other = _of_each_kind(arch, 2)
        counted = [collectives(x.as_text() or "") for x in (self.compile(other, num_tokens), program)]
        return _per_layer(*counted, num_layers=arch.num_layers - other.num_layers)

    def compile(self, arch: ArchConfig, num_tokens: int) -> jax.stages.Compiled:
        """The whole step of one bucket, with the layers that `arch` has."""
        layout = BatchLayout.of(self.schedule, num_tokens)
        mesh = tensor_mesh(self.num_chips, self.chip.devices(self.num_chips))
        params = abstract_params(arch, self.dtype, mesh)
        state = abstract_state(arch, self.schedule, kv_dtype=self.kv_dtype, backend=self.backend, mesh=mesh)
        args = (params, state, _tensor((layout.blob_size,), jnp.dtype("int32"), (None,), mesh))
        program = make_serve_step(arch, layout, backend=self.backend, num_devices=self.num_chips)
        if mesh is not None:
            program = over_devices(program, mesh, args, (specs_of(state), PartitionSpec()))
        return self.chip.compile(program, args, donate_argnums=(1,), mesh=mesh)


def abstract_params(arch: ArchConfig, dtype: jnp.dtype, mesh: Mesh | None = None) -> Params:
    """Shapes of the weights; over the devices of a mesh, shardings too."""
    num_devices = 1 if mesh is None else mesh.size

    def tensor(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        parts = [num_devices if dim == spec.split_dimension else 1 for dim in range(len(spec.shape))]
        shape = tuple(size * count for size, count in zip(spec.shape, parts, strict=True))
        return _tensor(shape, dtype, spec.axes, mesh)

    params: Params = build_tree(registry.param_specs(arch.local(num_devices)), tensor)
    return params


def temp_bytes(program: jax.stages.Compiled) -> int:
    """Of temporaries on one device, and of results that take no argument's place."""
    memory = program.memory_analysis()
    assert memory is not None, "every compiler that is used here tells it"
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def collectives(program: str) -> tuple[Collective, ...]:
    """Every exchange in the text of a compiled program, those in branches and loops once."""
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for result, kind, start in _COLLECTIVE.findall(program):
        sizes = [_array_bytes(*array) for array in _ARRAY.findall(result)]
        if start and kind != "all-reduce":
            sizes = sizes[len(sizes) // 2 :]  # behind the operands
        counts[kind] += 1
        num_bytes[kind] += sum(sizes)
    return tuple(Collective(kind, counts[kind], num_bytes[kind]) for kind in sorted(counts))


def _array_bytes(kind: str, bits: str, sizes: str) -> int:
    return prod(int(size) for size in sizes.split(",") if size) * (8 if kind == "pred" else int(bits)) // 8


def _per_layer(
    without: tuple[Collective, ...], whole: tuple[Collective, ...], *, num_layers: int
) -> tuple[Collective, ...]:
    """What so many layers add to a program, each the same."""
    others = {exchange.kind: exchange for exchange in without}
    added = []
    for exchange in whole:
        other = others.get(exchange.kind, Collective(exchange.kind, 0, 0))
        count, num_bytes = exchange.count - other.count, exchange.num_bytes - other.num_bytes
        added.append(Collective(exchange.kind, count // num_layers, num_bytes // num_layers))
    return tuple(exchange for exchange in added if exchange.count)


def _of_each_kind(arch: ArchConfig, count: int) -> ArchConfig:
    """So many layers of each window there is."""
    windows = tuple(dict.fromkeys(arch.windows)) * count
    return dataclasses.replace(arch, num_layers=len(windows), windows=windows)


def _tensor(
    shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...], mesh: Mesh | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, axes) if mesh else None)

"""A model's memory on each device, with the sizes that the engine would choose."""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import PeakRates
from jaxserve.api.option_values import read_max_images
from jaxserve.assembly.generation_defaults import resolve_quantization
from jaxserve.assembly.memory import (
    accelerator_pool_bytes,
    adapter_bytes,
    choose_page_size,
    cpu_pool_bytes,
    encoder_cache_bytes,
    encoder_costs,
    encoder_rows,
    page_bytes,
    pool_dtype,
    score_costs,
    select_backend,
    state_bytes,
    tree_bytes,
)
from jaxserve.assembly.page_tiers import with_host_tier
from jaxserve.assembly.parameters import compute_dtype, matrix_dtype, not_packed
from jaxserve.errors import ConfigError
from jaxserve.execution.state import abstract_state
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params, without_tower
from jaxserve.models.stages import divide
from jaxserve.models.weight_reads import WeightReads
from jaxserve.scheduling.schedule_config import ScheduleConfig, resolve_schedule
from jaxserve.system import machine_memory
from jaxserve.tools.planner.host_memory import HostMemory, plan_host_memory
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import Collective, abstract_params
from jaxserve.tools.planner.speed import Roofline
from jaxserve.tools.planner.targets import DataSheet, Target


@dataclass(frozen=True)
class Memory:
    """Memory in bytes per chip, or per jax device if a chip has several.

    Attributes:
        limit: memory that XLA may allocate; on a CPU, the machine's memory.
        weights: all weights.
        slots: all decode slots, with snapshots of recurrent states, adapters and images.
        temp: largest temporaries in any compiled step; 0 if nothing was compiled.
        pool_limit: largest pool that the engine would allocate; negative if the weights and the reserve do not fit.
        page: page size.
        request: whole pages for a request with max_model_len tokens.
        reserve: memory that the engine keeps free for step temporaries; 0 on a CPU.
        outside: part of the limit that the engine leaves free: on a TPU the part above `gpu_memory_utilization`, on a
            CPU the part that its pool may not take.
        images: part of the slots for the encoder cache; 0 without images.
    """

    limit: int
    weights: int
    slots: int
    temp: int
    pool_limit: int
    page: int
    request: int
    reserve: int = 0
    outside: int = 0
    images: int = 0

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool that the engine would allocate."""
        return max(0, self.pool_limit // self.page)

    @property
    def beyond_reserve(self) -> int:
        """Bytes by which temporaries exceed the reserve."""
        return max(0, self.temp - self.reserve)

    @property
    def rest(self) -> int:
        """Unused bytes, less than a page if all fits; negative if bytes are missing."""
        taken = self.weights + self.slots + self.reserve + self.beyond_reserve + self.num_pages * self.page
        return self.limit - taken - self.outside

    @property
    def missing(self) -> int:
        """Bytes missing to serve a request with max_model_len tokens; 0 if it fits."""
        return max(0, self.missing_in_pool, self._missing_in_all)

    @property
    def missing_in_pool(self) -> int:
        """Bytes missing if the pool's limit, not the total memory, is the tighter bound; else 0."""
        lacking = self.request - self.pool_limit
        return max(0, lacking) if lacking > self._missing_in_all else 0

    @property
    def num_fitting_pages(self) -> int:
        """Number of pages that fit alongside everything else."""
        return max(0, min(self.pool_limit, self.limit - self.weights - self.slots - self.temp)) // self.page

    @property
    def _missing_in_all(self) -> int:
        """Bytes by which the sum of all parts exceeds the limit; negative if they fit."""
        pool = max(self.request, self.num_pages * self.page)
        return self.weights + self.slots + self.temp + pool - self.limit

    def times(self, count: int) -> "Memory":
        """Return the sizes multiplied by `count`, the number of devices per chip."""
        return Memory(**{name: count * size for name, size in dataclasses.asdict(self).items()})


@dataclass(frozen=True)
class Sizes:
    """A model's sizes on a target, as the engine would choose them.

    Attributes:
        name: the model's name.
        target: the chips.
        arch: whole model, or one of its pipeline stages.
        local: one device's part.
        dtype: weight and activation dtype.
        kv_dtype: KV pool's dtype.
        quantization: format to which matrices are quantised while they are loaded; None for no quantisation.
        backend: attention backend.
        params: weight shapes on one device.
        schedule: step and pool sizes; if the model does not fit, the pool holds one request of max_model_len.
        memory: memory per device, without temporaries.
        host: host memory for pages; None for none.
    """

    name: str
    target: Target
    arch: ArchConfig
    local: ArchConfig
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    quantization: str | None
    backend: str
    params: Params
    schedule: ScheduleConfig
    memory: Memory
    host: HostMemory | None = None

    @classmethod
    def resolve(cls, config: EngineConfig, target: Target, stage: int = 0) -> "Sizes":
        """Return the sizes that the engine would choose with these options on the target; ConfigError if it refuses.

        Args:
            config: engine options.
            target: chips of each pipeline stage.
            stage: index of the stage.
        """
        name, arch = read_model(config.model, with_images=read_max_images(config.limit_mm_per_prompt) > 0)
        config = resolve_quantization(config, arch)
        config = with_host_tier(config, arch, target.platform, math.inf)
        max_len = config.max_model_len or arch.max_position
        arch = arch.within(max_len).with_page_budget(config.page_budget, max_len)
        arch = arch.divided(target.num_devices, config.expert_parallel_size, config.num_data_shards)
        sheet, local = target.sheet, arch.local(target.num_devices)
        dtype = compute_dtype(config, arch, on_cpu=sheet is None)
        kv_dtype = pool_dtype(config, dtype)
        backend = _backend(config, sheet, local, kv_dtype)
        schedule = resolve_schedule(
            config,
            max_position=arch.max_position,
            platform=target.platform,
            page_size=choose_page_size(config, local, kv_dtype, backend),
            num_pages=1,
            windows=arch.kv_layout.windows,
            has_states=arch.state is not None,
            num_encoder_rows=encoder_rows(config, arch),
            encoder_costs=encoder_costs(arch),
            num_encoder_layers=1 if arch.images is None else arch.images.tower.num_layers,
            score_costs=score_costs(config, local),
            has_position_axes=arch.images is not None and arch.images.has_axes,
            sees_images=arch.sees_images,
        )
        arch = divide(arch, config.pipeline_parallel_size)[stage]
        local = arch.local(target.num_devices)
        matrices = matrix_dtype(config, arch, on_cpu=sheet is None)
        form = weight_format(config.quantization, arch.schemes)
        try:
            params = abstract_params(
                *(arch, dtype, config.quantization, target.num_devices),
                matrix_dtype=matrices,
                native=sheet is None and not_packed(config, form, matrices, "cpu") is None,
            )
        except weights.CheckpointError as error:  # a matrix cannot be split over the devices
            raise ConfigError(str(error), about=("tensor_parallel_size",)) from error
        memory = _memory(config, sheet, local, tree_bytes(params), schedule, kv_dtype=kv_dtype, backend=backend)
        num_pages = config.num_pages or memory.num_pages or schedule.kv_groups.num_pages(schedule.max_model_len)
        schedule = dataclasses.replace(schedule, num_pages=num_pages * schedule.num_data_shards)
        host = plan_host_memory(
            config, local, target.num_devices, page_size=schedule.page_size, kv_dtype=kv_dtype, backend=backend
        )
        return cls(
            *(name, target, arch, local, dtype, kv_dtype, config.quantization, backend, params, schedule, memory, host)
        )

    @classmethod
    def resolve_stages(cls, config: EngineConfig, target: Target) -> list["Sizes"]:
        """Return the sizes of all pipeline stages, each on the target's chips; all have as many pages as fit in each.

        Raises:
            ConfigError: the engine refuses the options.
        """
        stages = [cls.resolve(config, target, stage) for stage in range(config.pipeline_parallel_size)]
        if len(stages) == 1:
            return stages
        num_pages = min(stage.schedule.num_pages for stage in stages)
        schedule = dataclasses.replace(stages[0].schedule, num_pages=num_pages)
        return [dataclasses.replace(stage, schedule=schedule) for stage in stages]

    @classmethod
    def resolve_tightest(cls, config: EngineConfig, target: Target) -> "Sizes":
        """Return the sizes of the pipeline stage with the fewest pages; see `resolve_stages`."""
        return min(cls.resolve_stages(config, target), key=lambda stage: stage.tightness)

    @property
    def tightness(self) -> tuple[int, int]:
        """Key by which the stage with the least memory for pages comes first."""
        return self.memory.num_pages, -self.memory.missing

    def roofline(self, collectives: tuple[Collective, ...] = (), collective_tokens: int = 1) -> Roofline:
        """Return the roofline for steps on chips with a data sheet; see `Roofline` for the arguments."""
        target, sheet, local, pool = self.target, self.target.sheet, self.local, self.schedule
        assert sheet is not None, "this machine has no data sheet"
        share = 1 / target.devices_per_chip
        return Roofline(
            arch=local,
            schedule=pool,
            peak_rates=PeakRates(share * sheet.flops_per_s[self.dtype.name], share * sheet.bytes_per_s),
            link_bytes_per_s=target.num_links * sheet.link_bytes_per_s,
            num_chips=target.num_chips,
            weight_reads=WeightReads.from_params(
                without_tower(self.params), registry.param_specs(local), tree_bytes, has_logits=self.arch.stage.is_last
            ),
            kv_token_bytes=int(
                self.memory.page * local.kv_layout.num_layers_read // (pool.page_size * local.kv_layout.num_pool_layers)
            ),
            state_bytes=state_bytes(local),
            collectives=collectives,
            collective_tokens=collective_tokens,
        )


def _backend(config: EngineConfig, sheet: DataSheet | None, local: ArchConfig, kv_dtype: jnp.dtype) -> str:
    """Return the attention backend that the engine would choose on a chip, or on this CPU if `sheet` is None."""
    if sheet is None:
        return select_backend(config, local, kv_dtype, platform="cpu")
    with jax.sharding.use_abstract_mesh(sheet.chip.mesh()):
        return select_backend(config, local, kv_dtype)


def _memory(
    config: EngineConfig,
    sheet: DataSheet | None,
    local: ArchConfig,
    weight_bytes: int,
    schedule: ScheduleConfig,
    *,
    kv_dtype: jnp.dtype,
    backend: str,
) -> Memory:
    """Return the memory per device without the temporaries, which are known only after compilation.

    Args:
        config: engine options.
        sheet: the chip's data sheet; None for this machine's CPU.
        local: one device's part of the model.
        weight_bytes: size of its weights.
        schedule: step sizes.
        kv_dtype: KV pool's dtype.
        backend: attention backend.
    """
    page = page_bytes(local, schedule.page_size, kv_dtype, backend)
    state = abstract_state(local, schedule, kv_dtype=kv_dtype, backend=backend)
    slots = tree_bytes((state.slots, state.states)) + adapter_bytes(config, local, on_cpu=sheet is None)
    images = encoder_cache_bytes(config, local, compute_dtype(config, local, on_cpu=sheet is None))
    slots += images
    if sheet is None:
        limit, pool_limit = (
            machine_memory.machine_bytes(),
            math.floor(cpu_pool_bytes(config, local, schedule.page_size, page)),
        )
        reserve, outside = 0, max(0, limit - weight_bytes - slots - max(0, pool_limit))
    else:
        limit = sheet.limit_bytes(config.gpu_memory_utilization)
        sizes = {"total_bytes": sheet.device_bytes, "limit_bytes": limit, "used_bytes": weight_bytes}
        pool_limit = math.floor(accelerator_pool_bytes(config, local, **sizes))
        share = min(math.floor(sheet.device_bytes * config.gpu_memory_utilization), limit)
        reserve, outside = share - weight_bytes - slots - pool_limit, limit - share
    return Memory(
        limit=limit,
        weights=weight_bytes,
        slots=slots,
        images=images,
        temp=0,
        pool_limit=pool_limit,
        page=page,
        request=schedule.kv_groups.num_pages(schedule.max_model_len) * page,
        reserve=reserve,
        outside=outside,
    )

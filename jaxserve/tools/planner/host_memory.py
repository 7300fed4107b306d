"""HostMemory: pages that a replica keeps in host memory, and rows that are swapped out."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.memory import state_bytes, tree_bytes
from jaxserve.execution.page_programs import KVLayout, PagedPool, PagePrograms
from jaxserve.execution.state import new_pool
from jaxserve.models.arch import ArchConfig
from jaxserve.scheduling.schedule_config import ScheduleConfig


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes per replica, over all its devices.

    Attributes:
        size: capacity, `kv_offloading_size`.
        page: page size.
        state: size of a state snapshot; 0 without recurrent layers.
    """

    size: int
    page: int
    state: int

    def num_tokens(self, schedule: ScheduleConfig) -> int:
        """Return the number of tokens whose pages fit."""
        return self.size // self.page // schedule.kv_groups.size * schedule.page_size

    def request_bytes(self, schedule: ScheduleConfig) -> int:
        """Return the bytes that a request with max_model_len tokens takes when it is swapped out."""
        return schedule.kv_groups.num_pages(schedule.max_model_len) * self.page + self.state


def plan_host_memory(
    config: EngineConfig, local: ArchConfig, num_devices: int, *, page_size: int, kv_dtype: jnp.dtype, backend: str
) -> HostMemory | None:
    """Return the host memory that an engine with these options takes; None if it keeps no pages there.

    Args:
        config: engine options.
        local: one device's part of the model.
        num_devices: devices of a replica.
        page_size: tokens per page.
        kv_dtype: KV pool's dtype.
        backend: attention backend.
    """
    if not config.kv_offloading_size:
        return None
    pool = jax.eval_shape(partial(new_pool, local, 1, page_size, kv_dtype=kv_dtype, backend=backend))
    page = PagePrograms("pages", [PagedPool(pool, KVLayout(backend, local.kv_layout.pool.kind))], None).page_shapes()
    state = state_bytes(local) if local.state is not None else 0
    return HostMemory(int(config.kv_offloading_size * 2**30), num_devices * tree_bytes(page), num_devices * state)

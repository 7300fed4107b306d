"""Draft: weights and sizes of an engine's proposer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.memory import page_bytes
from jaxserve.assembly.parameters import copies, on_every_device
from jaxserve.execution.proposer import Proposer
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.scheduling.schedule_config import ScheduleConfig

if TYPE_CHECKING:
    from jaxserve.spec_decode.draft_layer import LayerHead


@dataclasses.dataclass(frozen=True)
class Draft:
    """Weights and sizes of a proposer; without arguments, of an engine that has none.

    Attributes:
        params: weights on one device, or split over the first replica's devices; empty for n-gram lookup.
        arch: sizes of a draft model or layer; None for n-gram lookup and Medusa heads.
        backend: attention backend.
        head: type and sizes of a draft layer; None without one.
        is_split: True if its weights are split over devices like the model's.
    """

    params: Params = dataclasses.field(default_factory=dict)
    arch: ArchConfig | None = None
    backend: str = ""
    head: LayerHead | None = None
    is_split: bool = False

    def replicas(self, meshes: Sequence[Mesh | None]) -> list[Params]:
        """Return the weights on each replica's devices."""
        if self.is_split:
            return copies(self.params, meshes)
        return [on_every_device(self.params, mesh) for mesh in meshes]

    def page_bytes(self, kv_dtype: jnp.dtype, page_size: int) -> int:
        """Return the bytes per page of `page_size` tokens in the proposer's own pool; 0 if it has none."""
        return 0 if self.arch is None else page_bytes(self.arch, page_size, kv_dtype, self.backend)

    def proposer(
        self, config: EngineConfig, arch: ArchConfig, schedule: ScheduleConfig, kv_dtype: jnp.dtype
    ) -> Proposer | None:
        """Return the proposer for speculative decoding; None without it.

        Args:
            config: engine options.
            arch: sizes of the whole model.
            schedule: sizes of steps and page pool.
            kv_dtype: pool dtype.
        """
        return None

"""Draft: weights and sizes of an engine's proposer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.memory import page_bytes
from jaxserve.assembly.parameters import copies, on_every_device
from jaxserve.execution.proposer import Proposer
from jaxserve.models.arch import ArchConfig, Stage
from jaxserve.models.params import Params
from jaxserve.scheduling.schedule_config import ScheduleConfig

if TYPE_CHECKING:
    from jaxserve.spec_decode.draft_layer import LayerHead


@dataclasses.dataclass(frozen=True)
class Draft:
    """A proposer's weights and sizes; without arguments, for an engine that has none.

    Attributes:
        params: weights on one device, or split over the first replica's devices; empty for n-gram lookup.
        arch: sizes of a draft model or layer; None for n-gram lookup and Medusa heads.
        backend: attention backend.
        head: type and sizes of a draft layer; None without one.
        is_split: True if its weights are split over devices like the model's.
        reads_features: True if it reads the model's hidden states, which only the last pipeline stage has.
    """

    params: Params = dataclasses.field(default_factory=dict)
    arch: ArchConfig | None = None
    backend: str = ""
    head: LayerHead | None = None
    is_split: bool = False
    reads_features: bool = False

    def is_in(self, stage: Stage) -> bool:
        """Return whether a pipeline stage drafts."""
        return stage.is_last if self.reads_features else stage.is_first

    def replicas(self, meshes: Sequence[Mesh | None], stages: Sequence[ArchConfig]) -> list[Params]:
        """Return the weights for each mesh: first for the first replica's `stages`, then for other replicas."""
        drafts = [self.is_in(stage.stage) for _, stage in zip(meshes, cycle(stages), strict=False)]
        own = [mesh for mesh, is_there in zip(meshes, drafts, strict=True) if is_there]
        placed = iter(
            copies(self.params, own) if self.is_split else [on_every_device(self.params, each) for each in own]
        )
        return [next(placed) if is_there else {} for is_there in drafts]

    def page_bytes(self, kv_dtype: jnp.dtype, stage: Stage, page_size: int) -> int:
        """Return the bytes per page of `page_size` tokens in the pool that the proposer has in a stage."""
        if self.arch is None or not self.is_in(stage):
            return 0
        return page_bytes(self.arch, page_size, kv_dtype, self.backend)

    def proposer(
        self, config: EngineConfig, arch: ArchConfig, schedule: ScheduleConfig, kv_dtype: jnp.dtype, stage: Stage
    ) -> Proposer | None:
        """Return a pipeline stage's proposer for speculative decoding; None without it.

        Args:
            config: engine options.
            arch: sizes of the whole model.
            schedule: sizes of steps and page pool.
            kv_dtype: pool dtype.
            stage: the stage.
        """
        return None

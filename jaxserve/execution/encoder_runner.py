"""EncoderRunner: dispatches encoder runs, whole or in parts between which steps run."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.execution.encoder_program import PackedRun, outer, pack_run, tower_layers
from jaxserve.execution.lowering import encoder_name
from jaxserve.images.prepared import PreparedImage
from jaxserve.models.params import Params
from jaxserve.models.vision import tower
from jaxserve.models.vision.arch import VisionArch
from jaxserve.models.vision.encoder import TowerState
from jaxserve.scheduling.step_plan import EncoderRun

_SLOW_PATCHES = 4096  # packing more takes tens of milliseconds, and is done on a thread


@dataclass
class _Begun:
    """An image between two parts.

    Attributes:
        image: the image.
        packed: its packed run without patches, or the thread that packs it.
        state: hidden states; None before the first layer.
    """

    image: PreparedImage
    packed: PackedRun | Future[PackedRun]
    state: TowerState | None = None


class EncoderRunner:
    """Encodes images into the encoder cache.

    Args:
        arch: sizes of the whole tower.
        programs: compiled programs by name, see `Lowering.encoders`.
    """

    def __init__(self, arch: VisionArch, programs: Mapping[str, Any]) -> None:
        self._arch, self._programs = arch, programs
        self._begun: _Begun | None = None
        self._thread = ThreadPoolExecutor(1, "pack-image")

    def run(self, run: EncoderRun, params: Params, cache: jax.Array) -> jax.Array:
        """Dispatch a run, and return the encoder cache after it.

        Args:
            run: an image, or the next part of the one that was begun.
            params: the tower's parameters.
            cache: the encoder cache, which is donated if the run ends an image.
        """
        size = self._arch.bucket(len(run.image.patches))
        if (encode := self._programs.get(encoder_name(size))) is not None:
            _, inputs, rows = pack_run(self._arch, run)
            return encode(params, cache, inputs, rows)
        if run.layers is None:
            begun = _Begun(run.image, pack_run(self._arch, run))
            return self._advance(begun, (0, self._arch.num_layers), size, params, cache)
        if not run.layers[1]:
            is_slow = size > _SLOW_PATCHES
            packed = self._thread.submit(pack_run, self._arch, run) if is_slow else pack_run(self._arch, run)
            self._begun = _Begun(run.image, packed)
            return cache
        assert self._begun is not None, "an image is begun before its first layer"
        assert self._begun.image == run.image, "one image at a time is encoded in parts"
        cache = self._advance(self._begun, run.layers, size, params, cache)
        if run.is_last:
            self._begun = None
        return cache

    def _advance(
        self, begun: _Begun, layers: tuple[int, int], size: int, params: Params, cache: jax.Array
    ) -> jax.Array:
        """Dispatch layers of an image, with all that comes before the first and after the last one."""
        if begun.state is None:
            packed = begun.packed.result() if isinstance(begun.packed, Future) else begun.packed
            begun.state = self._programs[encoder_name(size, "begin")](outer(params), packed.inputs)
            begun.packed = packed._replace(inputs=packed.inputs._replace(patches=None))
        stop = layers[1]
        for number, each in enumerate(tower_layers(params)[layers[0] : stop], layers[0]):
            numbers = np.array([each.row, *tower.layer_numbers(self._arch, number)], np.int32)
            run_layer = self._programs[encoder_name(size, f"layer {each.kind}")]
            begun.state = run_layer(each.params, begun.state, numbers)
        if stop < self._arch.num_layers:
            return cache
        assert isinstance(begun.packed, PackedRun), "it was packed before its first layer"
        finish = self._programs[encoder_name(size, "finish")]
        return finish(outer(params), cache, begun.state, begun.packed.inputs, begun.packed.rows)

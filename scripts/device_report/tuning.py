"""Block sizes of the TPU kernel, as in use and with one changed, for shapes of real models.

Its results become the kernel's table by `tuned_sizes.py`; measured again, tuning continues from there.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from device_report import machine as machines
from device_report.attention import Bench, Shape
from device_report.grid import FULL_TPU, TINY_TPU, WIDE
from device_report.kernels import KERNELS
from device_report.points import Figures, Latest, Point, UnavailableError
from jaxserve.pallas_kernels import ragged_paged_attention as attention
from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.ragged_paged_attention import mosaic_tpu

machine = machines.with_jax

BACKEND = "mosaic_tpu"
CHANGES = (
    *(("work_item_bytes", n * 2**20) for n in (1, 2, 4, 8)),
    *((name, n) for name in ("tile_keys", "tile_rows") for n in (256, 512, 1024)),
    *(("decode_keys", n) for n in (512, 1024, 2048)),
    *(("slots", n) for n in (2, 3, 4)),
)


class Heads(NamedTuple):
    """Part of a model's attention on one chip."""

    num_kv_heads: int
    group: int
    head_dim: int
    kv_dtype: str


class Steps(NamedTuple):
    """Timed rows: a number with one token each, and a chunk of one row."""

    rows: int
    context: int
    chunk: int
    chunk_context: int


HEADS = (
    Heads(8, 4, 128, WIDE),  # Llama 3.1 8B
    Heads(1, 8, 128, WIDE),  # Llama 3.1 70B over eight
    Heads(8, 4, 64, WIDE),  # Llama 3.2 1B
    Heads(8, 4, 128, "int8"),
)
STEPS = Steps(64, 4096, 2048, 8192)
TINY_STEPS = Steps(2, 40, 24, 24)


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """Yield each shape's points: with the sizes in use, then with each change."""
    grid, steps = (TINY_TPU, TINY_STEPS) if dry_run else (FULL_TPU, STEPS)

    def make(heads: Heads) -> Tuner:
        own = dataclasses.replace(grid, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
        return Tuner(Bench(device, own, dry_run), heads, steps)

    tuners: Latest[Heads, Tuner] = Latest(make)

    def measure(heads: Heads, change: dict[str, int]) -> Figures:
        return tuners.get(heads).measure(change)

    for heads in [Heads(grid.num_kv_heads, 2, grid.head_dim, WIDE)] if dry_run else HEADS:
        yield Point("tuning", {**heads._asdict(), "change": "none"}, partial(measure, heads, {}))
        for name, size in CHANGES[:1] if dry_run else CHANGES:
            settings = {**heads._asdict(), "change": f"{name}={size}"}
            yield Point("tuning", settings, partial(measure, heads, {name: size}))


class Tuner:
    """Measures changes for one shape."""

    def __init__(self, bench: Bench, heads: Heads, steps: Steps) -> None:
        num_kv_heads, self._group, head_dim, self._kv_dtype = heads
        kv_dtype = jnp.dtype(self._kv_dtype)
        kind = attention.Heads(num_kv_heads, head_dim)
        page_size = attention.default_page_size(BACKEND, kind, kv_dtype)
        sizes = num_kv_heads * self._group, page_size, kv_dtype, jax.default_backend()
        self._problem = attention.Problem(kind, *sizes)
        self._bench, self._steps = bench, steps

    def measure(self, change: dict[str, int]) -> Figures:
        """Return the figures with this change to the sizes in use."""
        with KERNELS["tpu"].runnable():
            in_use = dataclasses.asdict(mosaic_tpu.KERNEL.sizes(self._problem))
        if change and all(in_use[name] == size for name, size in change.items()):
            raise UnavailableError("that is in use")
        sizes = in_use | change
        decode = self._measure((1,) * self._steps.rows, self._steps.context, sizes)
        prefill = self._measure((self._steps.chunk,), self._steps.chunk_context, sizes)
        return {
            "chip": tpu.target_chip().name if self._problem.platform == "tpu" else "none",
            "shape": mosaic_tpu.shape_class(self._problem),
            "sizes": sizes,
            "decode_us": decode["us"],
            "prefill_us": prefill["us"],
            "kv_gb_per_s": decode["kv_gb_per_s"],
        }

    def _measure(self, q_lens: tuple[int, ...], context: int, sizes: dict[str, int]) -> Figures:
        settings = (self._group, self._problem.page_size, self._kv_dtype, BACKEND)
        return self._bench.measure(Shape(*settings, q_lens, tuple(sizes.items())), context)

"""Peak rates of the device: copying, adding in place, reading; and a matmul."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from device_report import machine as machines
from device_report.points import Figures, Point, effort, median_s

machine = machines.with_jax

CHAIN_LEN = 8
BANDWIDTH_KINDS = ("copy", "add", "read")


def points(_: str, dry_run: bool) -> Iterator[Point]:
    """Yield bandwidths over sizes larger than any cache, and square random matmuls."""
    sizes = (1,) if dry_run else (256, 1024, 4096)
    for kind in BANDWIDTH_KINDS:
        for mib in sizes:
            yield Point(kind, {"mib": mib}, partial(bandwidth, kind, mib, dry_run))
    for size in (64,) if dry_run else (4096, 8192):
        yield Point("gemm", {"size": size, "dtype": "bfloat16"}, partial(gemm, size, dry_run))


def bandwidth(kind: str, mib: int, dry_run: bool) -> Figures:
    """Return bytes read and written over the time of one pass; passes follow each other on the device."""
    x = jax.random.normal(jax.random.key(mib), (mib << 19,), jnp.bfloat16)
    bytes_per_pass = x.nbytes if kind == "read" else 2 * x.nbytes
    seconds = median_s({"copy": _copies, "add": _adds, "read": _reads}[kind](x), effort(dry_run))
    passes = 1 if kind == "copy" else CHAIN_LEN
    return {"us": 1e6 * seconds / passes, "gb_per_s": bytes_per_pass * passes / seconds / 1e9}


def gemm(size: int, dry_run: bool) -> Figures:
    """Repeat `x = x @ w`; `w` is scaled so that values keep their magnitude."""
    x, w = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (1, 2))
    w = (w * size**-0.5).astype(x.dtype)
    seconds = median_s(_repeated(jax.jit(partial(_chain, lambda x, w: x @ w)), x, w), effort(dry_run))
    return {"us": 1e6 * seconds / CHAIN_LEN, "tflop_per_s": 2 * size**3 * CHAIN_LEN / seconds / 1e12}


def _copies(x: Array) -> Callable[[int], None]:
    """Copy into a new array in each pass: XLA copies an array that it may not overwrite."""
    copy = jax.jit(jnp.copy)

    def run(count: int) -> None:
        for _ in range(count):
            y = copy(x)
        y.block_until_ready()

    return run


def _adds(x: Array) -> Callable[[int], None]:
    return _repeated(jax.jit(partial(_chain, lambda x, _: x + 1)), x, None)


def _reads(x: Array) -> Callable[[int], None]:
    """Make each pass depend on the previous result, so that none is skipped."""
    program = partial(_chain, lambda largest, x: jnp.max(jnp.abs(x - largest)))
    return _repeated(jax.jit(program), jnp.zeros((), x.dtype), x)


def _chain(step: Callable[[Array, Array | None], Array], x: Array, w: Array | None) -> Array:
    """Chain steps that XLA may not merge."""
    for _ in range(CHAIN_LEN):
        x = lax.optimization_barrier(step(x, w))
    return x


def _repeated(program: Callable[..., Array], *args: Array | None) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            last = program(*args)
        last.block_until_ready()

    return run

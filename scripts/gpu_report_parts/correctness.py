"""Whether what is served is right: every case of the kernels of GPUs, and the invariants of the engine in bfloat16."""

import math
import secrets
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from gpu_report_parts import invariants, kernels
from gpu_report_parts import machine as machines
from gpu_report_parts.points import Figures, Point, UnavailableError
from pallas_kernels.dispatch import UnsupportedBackendError
from pallas_kernels.ragged_paged_attention import Pages, from_canonical, ragged_paged_attention, to_canonical
from pallas_kernels.ragged_paged_attention.cases import GPU_CASES, Case, Inputs, pool_error

machine = machines.with_jax

OUTPUT_TOLERANCE = 1e-2
TINY_CASES = ("rope_bfloat16", "int8_pages_of_8_rope")
SEED = secrets.randbits(32)  # new inputs every time

_attend = jax.jit(
    ragged_paged_attention, static_argnames=("scale", "window", "soft_cap", "backend"), donate_argnames="kv_pages"
)


def points(dry_run: bool) -> Iterator[Point]:
    """The engine first, then what serves on GPUs, then the fallback."""
    yield from invariants.points(dry_run)
    for backend in ("mosaic_gpu", "xla"):
        for case in GPU_CASES:
            if not dry_run or case.name in TINY_CASES:
                yield Point("kernel", {"backend": backend, "case": case.name}, partial(check, case, backend))


def check(case: Case, backend: str) -> Figures:
    """Errors of one backend against the reference, on inputs that no run had before."""
    inputs, expected_out, expected_pool = _expected(case)
    inputs = jax.device_put(inputs, jax.devices()[0])
    _leave_nan(inputs.q)
    pool = from_canonical(backend, inputs.kv_pages)
    try:
        with kernels.runnable():
            out, pool = _attend(**_arguments(case, inputs._replace(kv_pages=pool)), backend=backend)
    except UnsupportedBackendError as reason:
        raise UnavailableError(str(reason)) from None
    out = np.asarray(out, np.float32)
    difference = np.abs(out - expected_out) / (1 + np.abs(expected_out))  # an ulp of bfloat16 is 2**-6 at 2
    error = float(np.max(difference[: sum(case.q_lens)], initial=0))
    stored_error = pool_error(to_canonical(backend, pool), expected_pool)
    is_finite = bool(np.isfinite(out).all())
    is_close = error <= OUTPUT_TOLERANCE and stored_error <= case.pool_tolerance
    return {
        "max_error": error if math.isfinite(error) else None,
        "pool_error": stored_error if math.isfinite(stored_error) else None,
        "is_finite": is_finite,
        "passed": is_finite and is_close,
        "seed": SEED,
    }


@cache
def _expected(case: Case) -> tuple[Inputs, NDArray[np.float32], Pages]:
    """Inputs, and the reference's outputs and pool; on the host, where a number costs nothing to look at."""
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = case.inputs(SEED)
        out, pool = ragged_paged_attention(**_arguments(case, inputs), backend="reference")
    return inputs, np.asarray(out, np.float32), pool


def _arguments(case: Case, inputs: Inputs) -> dict[str, Any]:
    """Of the operation, which has the names of the inputs; the layer as a number of the device, as in a model."""
    return {**inputs._asdict(), **case.options, "layer": jnp.int32(inputs.layer)}


def _leave_nan(like: jax.Array) -> None:
    """Fill the memory that the next arrays of this size are likely to get: what a kernel fails to write is NaN."""
    jax.block_until_ready([jnp.full_like(like, jnp.nan) for _ in range(8)])

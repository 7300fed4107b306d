"""Correctness: every case of the device's kernels, and the engine's invariants in bfloat16."""

import math
import secrets
from collections.abc import Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from device_report import invariants
from device_report import machine as machines
from device_report.kernels import KERNELS, Kernel
from device_report.points import Figures, Point, UnavailableError
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention import Pages, from_canonical, ragged_paged_attention, to_canonical
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from tests.kernels import attention_reference
from tests.kernels.attention_cases import Arguments, Case, pool_error

machine = machines.with_jax

OUTPUT_TOLERANCE = 1e-2
SEED = secrets.randbits(32)  # new inputs every time

_attend = jax.jit(ragged_paged_attention, static_argnames=("options", "backend"), donate_argnames="kv_pages")


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """Yield the engine first, then the kernel, then the fallback."""
    kernel = KERNELS[device]
    yield from invariants.points(device, dry_run)
    for backend in kernel.backends:
        for case in kernel.cases:
            if not dry_run or case.name in kernel.tiny_cases:
                yield Point("kernel", {"backend": backend, "case": case.name}, partial(check, kernel, case, backend))


def check(kernel: Kernel, case: Case, backend: str) -> Figures:
    """Return one backend's errors against the reference, on inputs new in every run."""
    settings = case.num_query_heads, case.page_size, jnp.dtype(case.kv_dtype), jax.default_backend()
    kernel.check(backend, Problem(case.kind, *settings))
    arguments, expected_out, expected_pool = _expected(case)
    inputs, pool, layer = jax.device_put(arguments, jax.devices()[0], may_alias=False)  # the pool is donated
    _leave_nan(inputs.q)
    pool = from_canonical(backend, pool)
    try:
        with kernel.runnable():
            out, pool = _attend(inputs, pool, layer, case.options, backend=backend)
    except UnsupportedBackendError as reason:
        raise UnavailableError(str(reason)) from None
    out = np.asarray(out, np.float32)
    difference = np.abs(out - expected_out) / (1 + np.abs(expected_out))  # an ulp of bfloat16 is 2**-6 at 2
    error = float(np.max(difference[: case.num_live], initial=0))
    stored_error = pool_error(to_canonical(backend, pool, case.kind), expected_pool)
    is_finite = bool(np.isfinite(out).all())
    is_close = error <= OUTPUT_TOLERANCE and stored_error <= _pool_tolerance(case)
    return {
        "max_error": error if math.isfinite(error) else None,
        "pool_error": stored_error if math.isfinite(stored_error) else None,
        "is_finite": is_finite,
        "passed": is_finite and is_close,
        "seed": SEED,
    }


def _pool_tolerance(case: Case) -> float:
    """Return the tolerance for stored values: near zero, many float32 values lie close to a rotated value."""
    is_rotated_here = case.has_rope and case.kv_dtype == "float32"
    return max(case.pool_tolerance, 1e-3 if is_rotated_here else 0.0)


@cache
def _expected(case: Case) -> tuple[Arguments, NDArray[np.float32], Pages]:
    """Return arguments, and the reference's outputs and pool, on the host, where inspecting values is cheap."""
    with jax.default_device(jax.devices("cpu")[0]):
        arguments = case.arguments(SEED)
        out, pool = attention_reference.write_and_attend(*arguments, case.options)
    return arguments, np.asarray(out, np.float32), pool


def _leave_nan(like: jax.Array) -> None:
    """Fill memory that the next arrays of this size are likely to get: values left unwritten are NaN."""
    jax.block_until_ready([jnp.full_like(like, jnp.nan) for _ in range(8)])

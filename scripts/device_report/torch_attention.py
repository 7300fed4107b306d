"""torch at the same sizes: SDPA and FlexAttention over contiguous keys and values, replayed as CUDA graphs.

Inputs are spread over several copies, so that no cache holds them.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from device_report import machine as machines
from device_report.grid import FULL, TINY, Grid
from device_report.points import Figures, Point, UnavailableError, effort, median_s

machine = machines.with_torch

NUM_CALLS = 16  # calls per graph
CACHE_BYTES = 1 << 29  # minimum size of all copies together
MEMORY_SHARE = 0.8
Call = Callable[..., Any]

FLEX_ROWS, FLEX_CONTEXTS = (1, 8, 32, 128), (4096, 32768)  # each is compiled
TINY_FLEX = (1,), (40,)


def points(_: str, dry_run: bool) -> Iterator[Point]:
    """Yield SDPA, then FlexAttention."""
    grid = TINY if dry_run else FULL
    for group in grid.groups:
        for rows, context in grid.decodes():
            settings = {"rows": rows, "context": context, "group": group}
            yield Point("sdpa decode", settings, partial(measure, _sdpa, grid, dry_run, chunk=1, **settings))
        for chunk, context in grid.prefills() if group in grid.prefill_groups else ():
            settings = {"chunk": chunk, "context": context, "group": group}
            yield Point("sdpa prefill", settings, partial(measure, _sdpa, grid, dry_run, rows=1, **settings))
    for rows, context in itertools.product(*(TINY_FLEX if dry_run else (FLEX_ROWS, FLEX_CONTEXTS))):
        settings = {"rows": rows, "context": context, "group": grid.groups[0]}
        yield Point("flex decode", settings, partial(measure, _flex, grid, dry_run, chunk=1, **settings))


def measure(
    make: Callable[[int, int], Call],
    grid: Grid,
    dry_run: bool,
    *,
    rows: int,
    chunk: int,
    context: int,
    group: int,
) -> Figures:
    """Measure the last `chunk` tokens of every row attending over its whole context."""
    torch = _torch(dry_run)
    K, kv_bytes = grid.num_kv_heads, grid.token_bytes * context * rows
    if not dry_run and kv_bytes > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
        raise UnavailableError(f"keys and values of {kv_bytes / 1e9:.1f} GB do not fit")
    copies = 1 if dry_run else min(NUM_CALLS, math.ceil(CACHE_BYTES / kv_bytes))

    def normal(num_heads: int, num_tokens: int) -> Any:
        shape = rows, num_heads, num_tokens, grid.head_dim
        return torch.randn(shape, dtype=torch.bfloat16, device="cpu" if dry_run else "cuda")

    inputs = [(normal(K * group, chunk), normal(K, context), normal(K, context)) for _ in range(copies)]
    attend = make(chunk, context)
    calls = [partial(attend, *inputs[i % copies]) for i in range(NUM_CALLS)]
    seconds = median_s(_eager(calls) if dry_run else _graph(torch, calls), effort(dry_run)) / NUM_CALLS
    lens = (chunk,) * rows
    return grid.figures(seconds, q_lens=lens, context=context, group=group, token_bytes=grid.token_bytes)


def _torch(dry_run: bool) -> Any:
    try:
        import torch  # noqa: PLC0415 - may be missing
    except ImportError as error:
        raise UnavailableError(f"torch: {error}") from None
    if not dry_run and not torch.cuda.is_available():
        raise UnavailableError("torch sees no GPU")
    return torch


def _sdpa(chunk: int, context: int) -> Call:
    from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415 - may be missing
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415

    options: Figures = {"enable_gqa": True}
    if chunk == context:
        options["is_causal"] = True
    elif chunk > 1:
        options["attn_mask"] = causal_lower_right(chunk, context)
    return partial(scaled_dot_product_attention, **options)


def _flex(chunk: int, context: int) -> Call:
    del chunk, context  # one query sees everything: there is no mask
    import torch  # noqa: PLC0415 - may be missing
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise UnavailableError("FlexAttention is compiled for GPUs alone")
    torch.compiler.reset()  # every shape separately, as static as ours
    return partial(torch.compile(flex_attention, dynamic=False), enable_gqa=True)


def _eager(calls: list[Call]) -> Callable[[int], None]:
    def run(count: int) -> None:
        for call in calls * count:
            call()

    return run


def _graph(torch: Any, calls: list[Call]) -> Callable[[int], None]:
    """Return all calls as one graph, warmed up on a separate stream, as capturing requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def run(count: int) -> None:
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()

    return run

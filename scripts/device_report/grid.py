"""Sizes at which attention is measured, ours and others', and each measurement's minimum cost."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from device_report.points import Figures

WIDE = "bfloat16"
ITEM_BYTES = 2  # bytes per WIDE value


@dataclass(frozen=True)
class Grid:
    """Sizes; groups and page sizes in order of interest."""

    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 4
    num_calls: int = 32  # calls per program
    rows: tuple[int, ...] = (1, 8, 32, 128, 256)
    contexts: tuple[int, ...] = (512, 4096, 32768)
    page_sizes: tuple[int, ...] = (16, 64)
    groups: tuple[int, ...] = (4, 8, 1)
    chunks: tuple[int, ...] = (512, 2048, 8192)
    prefill_contexts: tuple[int, ...] = (8192, 32768)  # alongside one as long as the chunk
    prefill_groups: tuple[int, ...] = (4, 8)
    # all but the first only with the first page size and group
    kv_dtypes: tuple[str, ...] = (WIDE, "int8", "float8_e4m3fn")
    # rows with one token, the chunk of one more row, and the context of all
    mixes: tuple[tuple[int, int, int], ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer, in bfloat16."""
        return 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES

    def decodes(self) -> Iterator[tuple[int, int]]:
        """Yield rows and context for each decode measurement."""
        return itertools.product(self.rows, self.contexts)

    def prefills(self) -> Iterator[tuple[int, int]]:
        """Yield chunk and context for each prefill measurement."""
        for chunk in self.chunks:
            yield chunk, chunk
            yield from ((chunk, context) for context in self.prefill_contexts if context > chunk)

    def longest(self) -> int:
        """Return the maximum context length."""
        return max(*self.contexts, *self.prefill_contexts, *(context for _, _, context in self.mixes))

    def figures(self, seconds: float, *, q_lens: Sequence[int], context: int, group: int, token_bytes: int) -> Figures:
        """Return the figures of a causal call whose rows compute the last tokens of contexts with equal length.

        Reading a token's keys and values takes `token_bytes`.
        """
        pairs = sum(count * (context - count) + count * (count + 1) // 2 for count in q_lens)
        flops = 4 * self.head_dim * self.num_kv_heads * group * pairs
        figures = {"us": 1e6 * seconds, "tflop_per_s": flops / seconds / 1e12}
        if 1 in q_lens:
            figures["kv_gb_per_s"] = token_bytes * context * len(q_lens) / seconds / 1e9
        return figures


FULL = Grid()
TINY = Grid(2, 32, 2, 2, (2,), (40, 100), (16,), (2,), (24,), (64,), (2,))
FULL_TPU = Grid(
    page_sizes=(64, 16, 256),  # narrow pools need 32 or more
    mixes=((32, 512, 4096), (128, 1024, 4096), (255, 1793, 2048)),  # the last is a whole step
)
TINY_TPU = Grid(2, 32, 1, 1, (2,), (40,), (16,), (2,), (24,), (24,), (2,), (WIDE,), ((2, 14, 40),))


def choose_grid(device: str, dry_run: bool) -> Grid:
    """Return a device's grid, or a small one that only shows that it works."""
    return {"gpu": (FULL, TINY), "tpu": (FULL_TPU, TINY_TPU)}[device][dry_run]

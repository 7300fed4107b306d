"""Step times from the planner's roofline, computed for many steps without arrays."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from jaxserve.models.registry import flop_counts
from jaxserve.tools.planner.speed import Roofline


class RooflineTimes:
    """`StepTimes` of a roofline: its `step_ms`, divided by an efficiency.

    Args:
        roofline: the model on its chips.
        efficiency: fraction of the roofline that steps reach, in (0, 1].
    """

    def __init__(self, roofline: Roofline, efficiency: float = 1.0) -> None:
        self._roofline, self._efficiency = roofline, efficiency
        schedule, arch = roofline.schedule, roofline.arch
        self._buckets = schedule.buckets()
        self._windows = Counter(layer.window for layer in arch.attention_layers)
        self._num_layers = len(arch.attention_layers)
        self._sees_all = not any(self._windows)
        self._flops = flop_counts(arch)
        # Rows that choose their tokens, and shards, need the roofline's own counts.
        self._is_plain = schedule.num_data_shards == 1 and schedule.sparsity is None and arch.token_choice is None

    def steps_s(self, starts: Sequence[int], counts: Sequence[int], num_steps: int = 1) -> list[float]:
        """Return the step times; see `StepTimes`."""
        if not self._is_plain:
            each = [[start + index for start in starts] for index in range(num_steps)]
            return [self._roofline.step_ms(now, counts) / 1e3 / self._efficiency for now in each]
        roofline, num_rows, num_tokens = self._roofline, len(counts), sum(counts)
        bucket = self._buckets[bisect_left(self._buckets, num_tokens)]
        rates = roofline.peak_rates
        fixed_bytes = roofline.weight_reads.step(bucket, num_tokens) + 2 * num_rows * roofline.state_bytes
        fixed_flops = self._flops.step(bucket, roofline.schedule.num_rows(bucket), 0)
        exchange_s = roofline.exchange_ms(bucket) / 1e3
        times = []
        first = self._attention(starts, counts, num_tokens, 0)
        more = self._num_layers * num_rows if self._sees_all else None  # each step later
        for index in range(num_steps):
            if more is None:
                num_scores, num_kv_tokens = self._attention(starts, counts, num_tokens, index)
            else:
                num_scores, num_kv_tokens = first[0] + index * more, first[1] + index * more
            kv_bytes = num_kv_tokens * roofline.kv_token_bytes // self._num_layers if self._num_layers else 0
            compute_s = (fixed_flops + num_scores * self._flops.per_score) / rates.flops_per_s
            memory_s = (fixed_bytes + kv_bytes) / rates.bytes_per_s
            times.append((max(compute_s, memory_s) + exchange_s) / self._efficiency)
        return times

    def _attention(self, starts: Sequence[int], counts: Sequence[int], num_tokens: int, shift: int) -> tuple[int, int]:
        """Return the scores, and the tokens read or written, of all layers `shift` steps later; see `attention_cost`.

        Args:
            starts: tokens before the computed ones, by row.
            counts: computed tokens, by row.
            num_tokens: sum of `counts`.
            shift: number of steps since `starts`.
        """
        num_scores = num_kv_tokens = 0
        rows = len(starts)
        for window, num_layers in self._windows.items():
            if num_tokens == rows:  # one token each
                seen = sum(starts) + rows * (shift + 1)
                if window is not None:
                    seen = sum([min(start + shift + 1, window) for start in starts])
                num_scores += num_layers * seen
                num_kv_tokens += num_layers * (seen + rows)
                continue
            for start, count in zip(starts, counts, strict=True):
                end = start + count
                scores, unread = _triangle(end) - _triangle(start), 0
                if window is not None:
                    scores -= _triangle(end - window) - _triangle(start - window)
                    unread = max(start - window + 1, 0)
                num_scores += num_layers * scores
                num_kv_tokens += num_layers * (end - unread + count)
        return num_scores, num_kv_tokens


def _triangle(x: int) -> int:
    """Return 1 + 2 + ... + x, or 0 for a negative number."""
    return x * (x + 1) // 2 if x > 0 else 0

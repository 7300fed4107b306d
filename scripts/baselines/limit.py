"""Arithmetic limit of a workload: the minimum time for its floating-point operations and memory reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from jaxserve.api.metrics import PeakRates
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.tools.bench.workloads import Workload


@dataclass(frozen=True)
class Work:
    """Work of a model that computes each distinct token in all layers.

    It is what an engine cannot avoid without approximations, except in the last layer, which may skip all but keys and
    values for tokens that are not sampled: for long prompts, up to one layer's part.

    Attributes:
        flops: FLOPs; shared prefixes are computed once.
        num_bytes: bytes read: the weights once per output token in the longest request, as all requests may be batched,
            and keys and values by decoding rows.
    """

    flops: int
    num_bytes: int

    def seconds(self, rates: PeakRates) -> float:
        """Return the time at peak rates, with computation and memory reads one after the other."""
        return self.flops / rates.flops_per_s + self.num_bytes / rates.bytes_per_s


def least_work(workload: Workload, arch: ArchConfig, float_bytes: int = 4) -> Work:
    """Return a workload's work if all requests are queued immediately.

    Args:
        workload: the requests.
        arch: model sizes.
        float_bytes: bytes per weight, key and value.
    """
    prefixes: dict[int, int] = {}
    computed: list[range] = []  # token positions that each sequence computes
    decoded: list[range] = []
    for request in workload.requests:
        end = request.prompt_len + request.output_len - 1  # the last token is not computed
        computed.append(range(request.prefix_len, end))
        decoded.append(range(request.prompt_len, end))
        if request.prefix_id is not None:
            prefixes[request.prefix_id] = max(request.prefix_len, prefixes.get(request.prefix_id, 0))
    computed += map(range, prefixes.values())
    num_outputs = sum(request.output_len for request in workload.requests)
    flops = registry.flop_counts(arch).step(sum(map(len, computed)), num_outputs, _num_scores(arch, computed))
    num_steps = max(request.output_len for request in workload.requests)
    kv_bytes = _num_scores(arch, decoded) * float_bytes * arch.attention.kv.token_size
    return Work(flops, num_steps * float_bytes * _num_weights(arch) + kv_bytes)


def _num_scores(arch: ArchConfig, sequences: Iterable[range]) -> int:
    """Count query-key pairs in one head for tokens at these positions, summed over layers."""
    windows = [layer.attention.window for layer in arch.layers if layer.state is None]
    ranges = list(sequences)
    return sum(min(position + 1, window or position + 1) for window in windows for each in ranges for position in each)


def _num_weights(arch: ArchConfig) -> int:
    """Return the number of elements in all matrices that a step multiplies, with all experts."""
    specs = [spec for spec in registry.param_specs(arch) if spec.is_matrix]
    return sum(prod(spec.shape) for spec in specs if arch.tied_embeddings or spec.path != ("embed",))

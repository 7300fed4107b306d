"""Step statistics against counts made by hand."""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import pytest
from checkpoints import write_checkpoint

from jaxserve.api.metrics import PeakRates
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.models import registry
from tests.e2e import workloads

Start = Callable[..., DrivenEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_bytes_and_flops_of_a_prefill_and_a_decode(start: Start) -> None:
    engine = start(step_ahead=False)
    arch, params = engine.arch, engine.replicas[0].executor.params
    engine.add_request("0", workloads.tokens(7, "accounts"), GREEDY)
    shapes = [spec.shape for spec in registry.param_specs(arch) if spec.path[0] == "layers"]
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    for start_at, count, bucket in ((0, 7, 16), (7, 1, 1)):
        engine.step()
        step = engine.last_step
        assert (step.num_tokens, step.num_padding_tokens) == (count, bucket - count)
        rows = min(bucket, engine.schedule.max_num_seqs)
        scores = sum(range(start_at + 1, start_at + count + 1))
        attention = 4 * scores * arch.num_layers * arch.attention.num_heads * arch.attention.head_dim
        assert step.flops == 2 * bucket * matrices + 2 * rows * arch.vocab_size * arch.hidden_size + attention
        everything = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        unread_rows = arch.vocab_size - bucket
        assert step.weight_bytes == everything - unread_rows * arch.hidden_size * 4
        per_token = 2 * arch.num_layers * arch.attention.num_kv_heads * arch.attention.head_dim * 4
        assert step.kv_bytes == (start_at + count + count) * per_token
    engine.step()


@pytest.mark.long
def test_a_tied_embedding_is_read_as_the_head_and_for_its_rows(start: Start, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("tied")
    write_checkpoint(path, "llama", tie_word_embeddings=True, vocab_size=320)
    engine = start(model=str(path))
    workloads.generate(engine, [workloads.tokens(3, "tied")], GREEDY)
    params = engine.replicas[0].executor.params
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert "lm_head" not in params
    assert engine.replicas[0].executor.costs.weight_bytes(5, 5) == everything + 5 * engine.arch.hidden_size * 4


@pytest.mark.parametrize("step_ahead", [True, False])
def test_wall_times_of_steps_do_not_overlap(start: Start, step_ahead: bool) -> None:
    engine = start(step_ahead=step_ahead)
    before, last, started = dataclasses.replace(engine.stats), engine.last_step, time.monotonic()
    engine.add_request("0", workloads.tokens(30, "wall"), GREEDY)
    steps = []
    while engine.has_unfinished():
        engine.step()
        if engine.last_step is not last:
            last = engine.last_step
            steps.append(last)
    elapsed_ms = (time.monotonic() - started) * 1e3
    assert all(0 < step.wall_ms <= step.host_ms + step.device_ms + 1e-6 for step in steps)
    total = engine.stats.since(before)
    assert total.num_output_tokens == 3
    assert sum(step.wall_ms for step in steps) <= total.wall_ms <= elapsed_ms
    split = total.split(PeakRates(flops_per_s=1e18, bytes_per_s=1e18))
    assert split.total_ms == pytest.approx(total.wall_ms)
    assert 0 < split.efficiency < 1

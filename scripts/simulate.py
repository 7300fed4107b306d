"""Serve one long prompt and short ones behind it on a chip by its data sheet: the real scheduler, modelled steps.

    python scripts/simulate.py --model llama-3.1-8b --target h200 --long 128000 --short 100 --count 20

The short prompts come with the long one, right behind it. Prints one JSON line for each policy: steps and milliseconds
until first tokens, with the default policy and where no prompt counts as long. Nothing in it was measured on a chip.
"""

import argparse
import json
from typing import Any

import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.engine.core import Delta, EngineCore
from jaxserve.engine.events import Submitted
from jaxserve.engine.memory import state_bytes, tree_bytes
from jaxserve.engine.replica import Replica
from jaxserve.metrics import EngineStats, PeakRates
from jaxserve.models import registry
from jaxserve.models.weight_reads import WeightReads
from jaxserve.planner.modelled import ModelledExecutor
from jaxserve.planner.plan import read_model
from jaxserve.planner.program import abstract_params
from jaxserve.planner.speed import Roofline
from jaxserve.planner.targets import parse_target
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule_config import ScheduleConfig

BYTES = 2  # bytes of a bfloat16 value


def modelled(model: str, target: str, schedule: ScheduleConfig) -> tuple[Any, ModelledExecutor]:
    """The model in bfloat16 on one chip."""
    _, arch = read_model(model)
    sheet = parse_target(target).sheet
    assert sheet is not None, "a chip has a data sheet"
    params = abstract_params(arch, jnp.dtype(jnp.bfloat16))
    roofline = Roofline(
        arch=arch,
        schedule=schedule,
        peak_rates=PeakRates(sheet.flops_per_s["bfloat16"], sheet.bytes_per_s),
        link_bytes_per_s=sheet.link_bytes_per_s,
        num_chips=1,
        weight_reads=WeightReads.of(params, registry.param_specs(arch), tree_bytes),
        kv_token_bytes=2 * len(arch.attended_windows) * arch.num_kv_heads * arch.head_dim * BYTES,
        state_bytes=state_bytes(arch),
        collectives=(),
        collective_tokens=1,
    )
    return arch, ModelledExecutor(roofline)


def serve(arch: Any, executor: ModelledExecutor, lengths: list[int], num_output: int) -> list[tuple[int, float]]:
    """Steps read and seconds passed when each request had its first token."""
    replica = Replica(EngineConfig("none"), arch, executor, EngineStats())
    core = EngineCore([replica], step_ahead=True, on_failure=lambda _: None)
    params = SamplingParams(max_tokens=num_output)
    requests = [
        Request(f"{i}#0", [i, *range(1, n)], params, seed=0, max_total_tokens=n + num_output, arrival=i)
        for i, n in enumerate(lengths)
    ]
    for request in requests:
        core.inbox.append(Submitted([request]))
    first: dict[Request, tuple[int, float]] = {}
    num_steps = 0
    while core.has_work():
        core.step(executor.now_s)
        while core.outbox:
            delta = core.outbox.popleft()
            if isinstance(delta, Delta) and delta.step is not None:
                num_steps += 1
                for request, token_ids in zip(delta.step.plan.requests, delta.step.token_ids, strict=True):
                    if token_ids:
                        first.setdefault(request, (num_steps, delta.at_s))
    return [first[request] for request in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--long", type=int, default=128_000, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=100, help="tokens of each short one")
    parser.add_argument("--count", type=int, default=20, help="short ones")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()
    for name, threshold in (("default", 0), ("first come first", 131_072)):
        schedule = ScheduleConfig(
            256,
            args.max_num_batched_tokens,
            max_model_len=131_072,
            page_size=16,
            num_pages=20_000,
            few_programs=True,
            long_prefill_token_threshold=threshold,
        )
        arch, executor = modelled(args.model, args.target, schedule)
        long, *short = serve(arch, executor, [args.long, *[args.short] * args.count], num_output=16)
        figures = {
            "long_first_token": {"step": long[0], "ms": round(long[1] * 1e3, 1)},
            "short_first_tokens": {"last_step": max(s for s, _ in short), "last_ms": round(short[-1][1] * 1e3, 1)},
        }
        print(json.dumps({"bench": "simulate", "target": args.target, "policy": name, **figures}))


if __name__ == "__main__":
    main()

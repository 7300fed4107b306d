"""Serve one long prompt, followed by short ones, on a chip's data sheet: the real scheduler, modelled steps.

    python scripts/simulate.py --model llama-3.1-8b --target h200 --long 128000 --short 100 --count 20

The short prompts arrive right after the long one. Prints one JSON line per policy: steps and milliseconds until first
tokens, with the default policy and with no prompt counted as long. Nothing in it was measured on a chip.
"""

import argparse
import json
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.core.core import EngineCore
from jaxserve.core.deltas import Delta
from jaxserve.core.events import Submitted
from jaxserve.core.replica import Replica
from jaxserve.errors import ConfigError
from jaxserve.scheduling.request import Request
from jaxserve.tools.planner.modelled import ModelledExecutor
from jaxserve.tools.planner.sizes import Sizes
from jaxserve.tools.planner.targets import parse_target


def modelled(model: str, target: str, **options: Any) -> tuple[Any, ModelledExecutor]:
    """Return the model on chips, in the sizes that the engine would choose with these options."""
    stages = Sizes.resolve_stages(EngineConfig(model=model, **options), parse_target(target))
    sizes = max(stages, key=lambda stage: stage.memory.missing)
    if sizes.target.sheet is None:
        raise ConfigError(f"the target must be chips with a data sheet, got {target!r}; name GPUs or TPUs")
    if sizes.memory.missing:
        gigabytes = sizes.memory.missing / 1e9
        raise ConfigError(f"{model} must fit on {target}, and {gigabytes:.1f} GB are missing on each; take more chips")
    return sizes.local, ModelledExecutor(*(stage.roofline() for stage in stages))


def serve(arch: Any, executor: ModelledExecutor, lengths: list[int], num_output: int) -> list[tuple[int, float]]:
    """Return the steps read and seconds passed at each request's first token."""
    replica = Replica(EngineConfig("none"), arch, executor, EngineStats())
    core = EngineCore([replica], step_ahead=True, on_failure=lambda _: None)
    params = SamplingParams(max_tokens=num_output)
    requests = [
        Request(f"{i}#0", [i, *range(1, n)], params, seed=0, max_total_tokens=n + num_output, key=i, arrival=i)
        for i, n in enumerate(lengths)
    ]
    for request in requests:
        core.inbox.append(Submitted([request]))
    first: dict[int, tuple[int, float]] = {}
    num_steps = 0
    while core.has_work():
        core.step(executor.now_s)
        while core.outbox:
            delta = core.outbox.popleft()
            if isinstance(delta, Delta) and delta.step is not None:
                num_steps += 1
                for key, token_ids in zip(delta.step.keys, delta.step.token_ids, strict=True):
                    if token_ids:
                        first.setdefault(key, (num_steps, delta.at_s))
    return [first[request.key] for request in requests]


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
        options = {"long_prefill_token_threshold": threshold, "max_num_batched_tokens": args.max_num_batched_tokens}
        arch, executor = modelled(args.model, args.target, **options)
        long, *short = serve(arch, executor, [args.long, *[args.short] * args.count], num_output=16)
        figures = {
            "long_first_token": {"step": long[0], "ms": round(long[1] * 1e3, 1)},
            "short_first_tokens": {"last_step": max(s for s, _ in short), "last_ms": round(short[-1][1] * 1e3, 1)},
        }
        print(json.dumps({"bench": "simulate", "target": args.target, "policy": name, **figures}))


if __name__ == "__main__":
    main()

"""Generate with and without drafts, step by step, and note what each step did."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import EngineConfig, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.replica import StepTokens
from jaxserve.execution.executor import StepResult
from jaxserve.speculation_config import SpeculationConfig


@dataclass
class Case:
    """One way to generate, and what came of it.

    Attributes:
        name: name in tables and plots.
        engine: engine that generates.
        steps: one entry per dispatch of the last round.
        tokens: tokens of each prompt, in the last round, each with True if it was drafted.
        seconds: time of each prompt, in each round.
        drafts: drafted, accepted and sampled tokens of each draft and its verification, over all rounds.
    """

    name: str
    engine: Engine
    steps: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[list[tuple[int, bool]]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    drafts: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Median over the rounds of the tokens per second."""
        return sum(map(len, self.tokens)) / float(np.median(np.sum(self.seconds, axis=1)))

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted."""
        drafted, accepted, _ = np.sum(self.drafts, axis=0) if self.drafts else (0, 0, 0)
        return float(accepted / max(drafted, 1))

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass of the model over drafted tokens yields."""
        return float(np.mean([sampled for _, _, sampled in self.drafts])) if self.drafts else 0.0

    @property
    def drafted_share(self) -> float:
        """Share of the tokens that come from passes over drafted tokens; the others are of plain passes."""
        return sum(sampled for _, _, sampled in self.drafts) / (len(self.seconds) * sum(map(len, self.tokens)))

    def by_prompt(self) -> list[dict[str, float]]:
        """Return speed, the median over the rounds, and acceptance in the last round for each prompt."""
        found = []
        for index, (tokens, seconds) in enumerate(zip(self.tokens, np.median(self.seconds, axis=0), strict=True)):
            steps = [step for step in self.steps if step["prompt"] == index]
            drafted, accepted = (sum(s[f"num_{name}_tokens"] for s in steps) for name in ("drafted", "accepted"))
            found.append({"tokens_per_s": len(tokens) / float(seconds), "acceptance": accepted / max(drafted, 1)})
        return found

    def summary(self) -> dict[str, Any]:
        """Return the figures of the case."""
        names = ("tokens_per_s", "acceptance", "tokens_per_pass", "drafted_share")
        return {name: getattr(self, name) for name in names} | {
            "name": self.name,
            "num_rounds": len(self.drafts),
            "accepted_by_position": accepted_by_position(self.drafts),
            "theory": theory(self.drafts),
            "seconds": self.seconds,
            "by_prompt": self.by_prompt(),
            "num_dispatches": len(self.steps),
        }


def accepted_by_position(drafts: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return the share of the rounds that drafted so many tokens in which the first was accepted, the second, ..."""
    drafted, accepted, _ = np.array(drafts, np.int64).reshape(-1, 3).T
    positions = range(int(drafted.max(initial=0)))
    return [float((accepted > position).sum() / (drafted > position).sum()) for position in positions]


def theory(drafts: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    """Compare tokens per pass with E[n] = (1 - p^(k+1)) / (1 - p), averaged over the k that were drafted.

    p is the most likely probability that a token is accepted if those before it were: accepted tokens by all that were
    looked at, which are these and the first of each round that was not accepted.
    """
    if not drafts:
        return {}
    drafted, accepted, sampled = np.array(drafts, np.int64).T
    p = float(accepted.sum() / max(accepted.sum() + (accepted < drafted).sum(), 1))
    expected = float(np.mean([sum(p**n for n in range(k + 1)) for k in drafted.tolist()]))
    return {"p": p, "expected": expected, "ratio": float(sampled.mean()) / expected}


def start(name: str, speculation: SpeculationConfig | None, **options: Any) -> Case:
    """Start the engine of a case, all of its programs compiled."""
    config = EngineConfig(compile_ahead="all", speculative_config=speculation, **options)
    return Case(name, Engine(config))


def run_round(case: Case, prompts: Sequence[str], params: SamplingParams) -> None:
    """Generate after each prompt by itself; notes of the round before are replaced, sums go on."""
    case.steps, case.tokens = [], []
    case.seconds.append([])
    engine, [replica] = case.engine, case.engine.replicas
    update, schedule = replica.update, replica.executor.schedule
    page_bytes = schedule.page_size * replica.executor.kv_token_bytes

    def noted(result: StepResult) -> StepTokens:
        step = update(result)
        _note_tokens(case, step)
        return step

    engine.reset_prefix_cache()
    started = time.perf_counter()
    try:
        vars(replica)["update"] = noted
        for index, prompt in enumerate(prompts):
            case.tokens.append([])
            began = time.perf_counter()
            engine.add_request(str(index), prompt, params)
            while engine.has_unfinished():
                engine.step()
                now_s = time.perf_counter() - started
                for step in engine.core.last_steps:
                    memory = {"kv_memory_bytes": step.num_pages_used * page_bytes}
                    case.steps.append({"prompt": index, "at_s": now_s, **dataclasses.asdict(step), **memory})
            case.seconds[-1].append(time.perf_counter() - began)
    finally:
        del vars(replica)["update"]


def _note_tokens(case: Case, step: StepTokens) -> None:
    token_ids, rounds = step.token_ids[0], step.result.rounds
    if rounds is None:
        case.tokens[-1] += [(token_id, False) for token_id in token_ids]
        return
    left = list(token_ids)
    counts = (each[0].tolist() for each in (rounds.drafted, rounds.accepted, rounds.sampled))
    for num_drafted, num_accepted, num_sampled in zip(*counts, strict=True):
        if num_drafted and num_sampled:
            case.drafts.append((num_drafted, num_accepted, num_sampled))
        for position in range(min(num_sampled, len(left))):
            case.tokens[-1].append((left.pop(0), position < num_accepted))


def write_random_draft(source: Path, target: Path, seed: int = 0) -> Path:
    """Write a draft model with the sizes of another one and random weights."""
    import shutil  # noqa: PLC0415

    import jax  # noqa: PLC0415
    from safetensors.flax import load_file, save_file  # noqa: PLC0415 - numpy has no bfloat16

    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(str(source / "model.safetensors"))
    keys = jax.random.split(jax.random.key(seed), len(tensors))
    random = {
        name: jax.random.normal(key, tensor.shape, tensor.dtype) * tensor.std() if tensor.ndim > 1 else tensor
        for key, (name, tensor) in zip(keys, tensors.items(), strict=True)
    }
    save_file(random, str(target / "model.safetensors"))
    return target

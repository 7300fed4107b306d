"""Generate with and without drafts, step by step, and record each step."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import EngineConfig, SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.api.token_tree import TokenTree
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.replica import StepTokens
from jaxserve.scheduling.executor_protocol import StepResult


@dataclass
class Case:
    """One way to generate, and its results.

    Attributes:
        name: name in tables and plots.
        steps: one entry per dispatch in the last round.
        tokens: tokens per prompt in the last round, each with True if it was drafted.
        seconds: time per prompt in each round.
        drafts: drafted, accepted and sampled tokens per draft and verification, over all rounds.
        node_acceptance: probability that a token is accepted if its parent was, by level and rank; for cases with a
            tree.
    """

    name: str
    engine: DrivenEngine
    steps: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[list[tuple[int, bool]]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    drafts: list[tuple[int, int, int]] = field(default_factory=list)
    node_acceptance: list[list[float]] = field(default_factory=list)

    @property
    def tree(self) -> TokenTree | None:
        """Draft tree; None for chains."""
        speculation = self.engine.config.speculation
        return speculation and speculation.tree

    @property
    def tokens_per_s(self) -> float:
        """Median tokens per second over the rounds."""
        return sum(map(len, self.tokens)) / float(np.median(np.sum(self.seconds, axis=1)))

    @property
    def acceptance(self) -> float:
        """Fraction of drafted tokens that were accepted."""
        drafted, accepted, _ = np.sum(self.drafts, axis=0) if self.drafts else (0, 0, 0)
        return float(accepted / max(drafted, 1))

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per model pass over drafted tokens."""
        return float(np.mean([sampled for _, _, sampled in self.drafts])) if self.drafts else 0.0

    @property
    def drafted_share(self) -> float:
        """Fraction of tokens from passes over drafted tokens; the others come from plain passes."""
        return sum(sampled for _, _, sampled in self.drafts) / (len(self.seconds) * sum(map(len, self.tokens)))

    @property
    def pass_ms(self) -> float:
        """Time per model pass in the last round: a round with drafts, or a plain decode step.

        The median counts passes, not dispatches: a dispatch has several, with fixed costs.
        """
        drafts = bool(self.drafts)
        decoding = [s for s in self.steps if not s["num_prefill_tokens"] and (s["num_draft_rounds"] > 0) == drafts]
        times = [s["wall_ms"] / s["num_steps"] for s in decoding for _ in range(s["num_steps"])]
        return float(np.median(times)) if times else math.nan

    def by_prompt(self) -> list[dict[str, float]]:
        """Return speed (median over rounds) and acceptance in the last round, per prompt."""
        found = []
        for index, (tokens, seconds) in enumerate(zip(self.tokens, np.median(self.seconds, axis=0), strict=True)):
            steps = [step for step in self.steps if step["prompt"] == index]
            drafted, accepted = (sum(s[f"num_{name}_tokens"] for s in steps) for name in ("drafted", "accepted"))
            found.append({"tokens_per_s": len(tokens) / float(seconds), "acceptance": accepted / max(drafted, 1)})
        return found

    def summary(self) -> dict[str, Any]:
        """Return the case's figures."""
        names = ("tokens_per_s", "acceptance", "tokens_per_pass", "drafted_share", "pass_ms")
        return {name: getattr(self, name) for name in names} | {
            "name": self.name,
            "num_rounds": len(self.drafts),
            "accepted_by_position": accepted_by_position(self.drafts),
            "theory": theory(self.drafts, self.tree, self.node_acceptance),
            "seconds": self.seconds,
            "by_prompt": self.by_prompt(),
            "num_dispatches": len(self.steps),
        }


def accepted_by_position(drafts: Sequence[tuple[int, int, int]]) -> list[float]:
    """Return the fractions of rounds in which the first, second, ... drafted token was accepted, among rounds that
    drafted it.
    """
    drafted, accepted, _ = np.array(drafts, np.int64).reshape(-1, 3).T
    positions = range(int(drafted.max(initial=0)))
    return [float((accepted > position).sum() / (drafted > position).sum()) for position in positions]


def theory(
    drafts: Sequence[tuple[int, int, int]],
    tree: TokenTree | None = None,
    node_acceptance: Sequence[Sequence[float]] = (),
) -> dict[str, Any]:
    """Compare tokens per pass with the number expected from acceptance, averaged over drafted tokens or levels.

    For chains that is E[n] = (1 - p^(k+1)) / (1 - p). p is the maximum-likelihood probability that a token is accepted
    if the previous ones were: accepted tokens over verified ones, which include the first rejected one in each round.
    For trees see `expected_of_tree`; their node acceptance comes from other runs.
    """
    if not drafts:
        return {}
    drafted, accepted, sampled = np.array(drafts, np.int64).T
    if tree is None:
        p = float(accepted.sum() / max(accepted.sum() + (accepted < drafted).sum(), 1))
        found: dict[str, Any] = {"p": p}
        by_count = np.cumsum(p ** np.arange(drafted.max() + 1))
    else:
        found = {"node_acceptance": node_acceptance}
        by_count = np.array(expected_of_tree(tree, node_acceptance))
    expected = float(by_count[drafted].mean())
    return found | {"expected": expected, "ratio": float(sampled.mean()) / expected}


def expected_of_tree(tree: TokenTree, node_acceptance: Sequence[Sequence[float]]) -> list[float]:
    """Return the expected tokens per pass over the first 0, 1, ... levels of a tree.

    They are the sum over its nodes of the acceptance product on each node's path (Chen et al. 2024, Sequoia, with
    acceptance by rank only). For a chain with the same p in all levels this is E[n].
    """
    reached = [1.0]
    for parent, depth, rank in zip(tree.parent, tree.depth[1:], tree.rank, strict=True):
        reached.append(reached[parent] * node_acceptance[depth - 1][rank])
    levels = range(tree.num_levels + 1)
    return [sum(p for p, depth in zip(reached, tree.depth, strict=True) if depth <= level) for level in levels]


def measure_nodes(case: Case, prompts: Sequence[str], params: SamplingParams, **options: Any) -> None:
    """Measure node acceptance by runs with a chain, and with one-level trees of 1, 2, ... tokens.

    The chain yields the most likely token's acceptance in each level. One level yields how often the next rank is
    accepted if earlier ones were not, which is assumed to be the same in all levels.
    """
    speculation, tree = case.engine.config.speculation, case.tree
    assert speculation is not None, "the case drafts"
    assert tree is not None, "it drafts trees"

    def shares(paths: Sequence[tuple[int, ...]]) -> list[float]:
        other = dataclasses.replace(speculation, speculative_token_tree=paths, num_speculative_tokens=None)
        measured = start("other tree", other, **options)
        run_round(measured, prompts, params)
        measured.engine.close()
        return accepted_by_position(measured.drafts)

    chain = [1.0, *shares([(0,) * length for length in range(1, tree.num_levels + 1)])]
    found = [shares([(rank,) for rank in range(width)])[0] for width in range(1, max(tree.rank) + 2)]
    missed = [1 - each for each in np.maximum.accumulate(found)]
    rescued = [1 - after / before if before else 0.0 for before, after in itertools.pairwise(missed)]
    for before, after in itertools.pairwise(chain):
        level = [after / before if before else 0.0]
        for share in rescued:
            level.append((1 - sum(level)) * share)
        case.node_acceptance.append(level)


def start(name: str, speculation: SpeculationConfig | None, **options: Any) -> Case:
    """Start a case's engine, with all programs compiled."""
    config = EngineConfig(compile_ahead="all", speculative_config=speculation, **options)
    return Case(name, DrivenEngine(config))


def run_round(case: Case, prompts: Sequence[str], params: SamplingParams) -> None:
    """Generate after each prompt separately; records of the previous round are replaced, sums continue."""
    case.steps, case.tokens = [], []
    case.seconds.append([])
    engine, [replica] = case.engine, case.engine.replicas
    update, schedule = replica.update, replica.executor.schedule
    page_bytes = schedule.page_size * replica.executor.costs.kv_token_bytes

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
    """Write a draft model with another one's sizes and random weights."""
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

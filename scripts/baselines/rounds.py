"""Run the same workloads through all engines in turn, and collect medians, ratios, failures and their reasons."""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

from baselines.process import RunFailedError, Worker, WorkerDiedError
from jaxserve.tools.bench.workloads import Workload, token_ids

OURS = "jaxserve"
REFERENCE = "transformers"

Record = dict[str, Any]
T = TypeVar("T")


@dataclass
class Contest:
    """Engines that answer, in turn order.

    Attributes:
        workers: started workers; one that dies is removed.
        vocab_size: vocabulary size.
        say: receives a line about each run as it ends.
        runs: one record per measured run.
        failures: {"engine", "workload", "reason"} per failed measurement.
    """

    workers: dict[str, Worker]
    vocab_size: int
    say: Callable[[str], None]
    runs: list[Record] = field(default_factory=list)
    failures: list[Record] = field(default_factory=list)

    def load(self) -> dict[str, Record]:
        """Let the workers load their models, one after the other; return their self-descriptions."""
        answers = {engine: self._try(engine, "load", Worker.load) for engine in list(self.workers)}
        return {engine: ready for engine, ready in answers.items() if ready}

    def run(self, workload: Workload, num_rounds: int) -> None:
        """Warm up every engine, then run them in turns; a failed one leaves this workload.

        The ids in each round are compared with transformers', or with the first engine's if it is missing.
        """
        warm_up = partial(self._warm_up, workload=workload)
        entrants = [engine for engine in list(self.workers) if self._try(engine, workload.name, warm_up)]
        for number in range(num_rounds):
            measure = partial(self._measure, workload=workload, draw=f"round {number}")
            measured = {engine: self._try(engine, workload.name, measure) for engine in entrants}
            answers = {engine: answer for engine, answer in measured.items() if answer}
            entrants = list(answers)
            ids = {engine: answer.pop("token_ids") for engine, answer in answers.items()}
            reference = ids.get(REFERENCE) or next(iter(ids.values()), [])
            for engine, figures in answers.items():
                self._keep(
                    {"workload": workload.name, "engine": engine, "round": number}
                    | figures
                    | agreement(ids[engine], reference)
                )

    def _try(self, engine: str, workload: str, action: Callable[[Worker], T]) -> T | None:
        """Run an action with a worker; return None if it fails, and keep the reason."""
        try:
            return action(self.workers[engine])
        except RunFailedError as error:
            reason = str(error)
        except WorkerDiedError as error:
            reason = str(error)
            del self.workers[engine]
        self.failures.append({"engine": engine, "workload": workload, "reason": reason})
        self.say(f"{engine}, {workload}: {reason}")
        return None

    def _warm_up(self, worker: Worker, workload: Workload) -> Record:
        """Run unmeasured: in full if an engine compiles or tunes by shape, otherwise with a few requests."""
        first = slice(worker.ready["num_warm_up"])
        prompts = draw_prompts(workload, self.vocab_size, "warm-up")
        return worker.ask({"prompts": prompts[first], "output_lens": _output_lens(workload)[first]})

    def _measure(self, worker: Worker, workload: Workload, draw: str) -> Record:
        output_lens = _output_lens(workload)
        answer = worker.ask({"prompts": draw_prompts(workload, self.vocab_size, draw), "output_lens": output_lens})
        figures = {name: answer[name] for name in ("wall_s", "token_ids", "cores_used", "noise_share")}
        if len(output_lens) > 1:
            return {**figures, "unit": "output tok/s", "value": sum(output_lens) / answer["wall_s"]}
        another = draw_prompts(workload, self.vocab_size, f"{draw}, one token")
        first_token_s = worker.ask({"prompts": another, "output_lens": [1]})["wall_s"]
        rate = decode_rate(output_lens[0], answer["wall_s"], first_token_s)
        return {**figures, "unit": "decode tok/s", "value": rate, "ttft_s": first_token_s}

    def _keep(self, run: Record) -> None:
        self.runs.append(run)
        noise = "" if run["noise_share"] is None else f", others {run['noise_share']:.0%}"
        self.say(f"{run['workload']} {run['engine']} {run['round'] + 1}: {run['value']:.1f} {run['unit']}{noise}")


def draw_prompts(workload: Workload, vocab_size: int, draw: str) -> list[list[int]]:
    """Return prompts with the workload's lengths, different for each workload and `draw`.

    A prefix cache thus finds nothing from another run, only prefixes common to this run's requests.
    """
    return token_ids(replace(workload, seed=zlib.crc32(f"{workload.name}/{draw}".encode())), vocab_size)


def decode_rate(output_len: int, wall_s: float, first_token_s: float) -> float:
    """Return the tokens per second after the first; RunFailedError if the machine was too noisy to tell."""
    if wall_s <= first_token_s:
        raise RunFailedError(
            f"{output_len} tokens must take longer than one, got {wall_s:.4f} s and {first_token_s:.4f} s"
        )
    return (output_len - 1) / (wall_s - first_token_s)


def agreement(token_ids: list[list[int]], reference: list[list[int]]) -> Record:
    """Return the fractions of identical requests, and of tokens before the first difference."""
    pairs = list(zip(token_ids, reference, strict=True))
    alike = [_num_alike(own, other) for own, other in pairs]
    return {
        "equal_requests_share": sum(own == other for own, other in pairs) / len(pairs),
        "equal_tokens_share": sum(alike) / sum(len(other) for other in reference),
    }


def summarise(runs: Iterable[Record]) -> list[Record]:
    """Return one row per workload and engine, with `ratio`: the median of jaxserve's rate over the engine's."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for run in runs:
        groups.setdefault((run["workload"], run["engine"]), []).append(run)
    medians = {key: median(run["value"] for run in group) for key, group in groups.items()}
    return [
        _row(group, medians[key], None if (ours := medians.get((key[0], OURS))) is None else ours / medians[key])
        for key, group in groups.items()
    ]


def _row(group: list[Record], middle: float, ratio: float | None) -> Record:
    values = [run["value"] for run in group]
    return {
        **{name: group[0][name] for name in ("workload", "engine", "unit")},
        "min": min(values),
        "median": middle,
        "max": max(values),
        "ratio": ratio,
        "wall_s": _median(group, "wall_s"),
        "ttft_s": _median(group, "ttft_s"),
        "equal_requests_share": _median(group, "equal_requests_share"),
        "equal_tokens_share": _median(group, "equal_tokens_share"),
        "cores_used": _median(group, "cores_used"),
        "noise_share": _median(group, "noise_share"),
        "num_runs": len(group),
    }


def _median(group: Iterable[Mapping[str, Any]], name: str) -> float | None:
    known = [run[name] for run in group if run.get(name) is not None]
    return median(known) if known else None


def _num_alike(own: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), len(other))


def _output_lens(workload: Workload) -> list[int]:
    return [request.output_len for request in workload.requests]

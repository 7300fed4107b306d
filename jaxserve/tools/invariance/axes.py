"""Axes: ways to run the same requests, to be compared with each request run alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.api.metrics import EngineStats
from jaxserve.api.outputs import RequestOutput
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.tools.invariance.workload import Job, Sizes

PAGE_SIZE = 16
CHUNK = 32
MULTI_STEP = 8


@dataclass(frozen=True, slots=True)
class Axis:
    """A way to run requests, such as all together, whose tokens are compared with each request run alone.

    Attributes:
        name: name in the report.
        run: function that runs the requests on an engine.
        evidence: function from the run's statistics to evidence that they ran in this way; "" without evidence.
        options: function that returns engine options to add to the baseline's.
    """

    name: str
    run: Callable[[DrivenEngine, Sequence[Job]], list[RequestOutput]]
    evidence: Callable[[EngineStats], str]
    options: Callable[[Sizes], Mapping[str, Any]] = field(default=lambda sizes: {})


def baseline_options(sizes: Sizes) -> dict[str, Any]:
    """Return engine options for the runs to compare with: whole prompts, one step per dispatch."""
    return {
        "runner": "generate",
        "skip_tokenizer_init": True,
        "max_model_len": sizes.max_len,
        "max_num_seqs": sizes.num_requests,
        "max_num_batched_tokens": 1 << (sizes.prompt_len - 1).bit_length(),
        "page_size": PAGE_SIZE,
        "num_pages": sizes.num_requests * -(-sizes.max_len // PAGE_SIZE),
        "multi_step": 1,
        "step_ahead": False,
        "compile_ahead": "minimal",
    }


def alone(engine: DrivenEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run each request with an empty cache and no other request."""
    outputs = []
    for job in jobs:
        engine.reset_prefix_cache()
        outputs += _run(engine, [job])
    return outputs


def together(engine: DrivenEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run all requests, beginning in the same step."""
    engine.reset_prefix_cache()
    return _run(engine, jobs)


def one_by_one(engine: DrivenEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Submit the last request first, and another one before every second step."""
    engine.reset_prefix_cache()
    return _run(engine, jobs[::-1], steps_between=2)[::-1]


def again(engine: DrivenEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run each request alone twice, the second time with its prompt in the prefix cache."""
    outputs = []
    for job in jobs:
        engine.reset_prefix_cache()
        _run(engine, [job])
        outputs += _run(engine, [job])
    return outputs


def _run(engine: DrivenEngine, jobs: Sequence[Job], steps_between: int = 0) -> list[RequestOutput]:
    """Run requests on an engine, taking `steps_between` steps after each one is queued; return their outputs."""
    outputs: dict[int, RequestOutput] = {}
    for index, job in enumerate(jobs):
        outputs[index] = engine.add_request(str(index), job.prompt, job.params)
        for _ in range(steps_between):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    engine.step()  # collects the steps in flight after the last request has ended
    return [outputs[index] for index in range(len(jobs))]


def _rows(stats: EngineStats) -> str:
    """Return the number of tokens per step as evidence that requests ran in a batch; "" if they did not."""
    sampled = stats.num_sampled_tokens / max(stats.num_steps, 1)  # 1 or less without a batch
    return f"{sampled:.1f} tokens sampled per step" if sampled > 1 else ""


def _cached(stats: EngineStats) -> str:
    """Return the number of cached prompt tokens as evidence for the prefix cache; "" if there are none."""
    return f"{stats.num_cached_tokens} prompt tokens from the cache" if stats.num_cached_tokens else ""


def _chunks(stats: EngineStats) -> str:
    """Return the chunk size as evidence that prompts were divided; "" without prompts."""
    return f"chunks of at most {CHUNK} tokens" if stats.num_prefill_tokens else ""


def _preemptions(stats: EngineStats) -> str:
    """Return the number of preemptions as evidence that there were any; "" if not."""
    return f"preemptions: {stats.num_preemptions}" if stats.num_preemptions else ""


def _steps(stats: EngineStats) -> str:
    """Return the number of steps per dispatch as evidence for multi-step decode; "" if it was 1."""
    per_dispatch = stats.num_steps / max(stats.num_dispatches, 1)
    return f"{per_dispatch:.1f} steps per dispatch, dispatched ahead" if per_dispatch > 1 else ""


def _drafts(stats: EngineStats) -> str:
    """Return the numbers of drafted and accepted tokens as evidence for speculation; "" without drafts."""
    drafted = stats.num_drafted_tokens
    return f"{stats.num_accepted_tokens} of {drafted} drafted tokens accepted" if drafted else ""


def _devices(stats: EngineStats) -> str:
    """Return the number of devices as evidence for tensor parallelism."""
    return "2 devices"


def _few_pages(sizes: Sizes) -> dict[str, Any]:
    """Return the option `num_pages` with pages for three quarters of all prompts and a quarter of the outputs, and at
    least for one request.
    """
    whole = -(-sizes.max_len // PAGE_SIZE)
    some = -(-(sizes.prompt_len + sizes.max_tokens // 3) * 3 * sizes.num_requests // (4 * PAGE_SIZE))
    return {"num_pages": max(whole, some)}


AXES = (
    Axis("batch", together, _rows),
    Axis("arrival", one_by_one, _rows),
    Axis("cache", again, _cached),
    Axis("chunk", alone, _chunks, lambda sizes: {"max_num_batched_tokens": CHUNK}),
    Axis("preemption", together, _preemptions, _few_pages),
    Axis("multi-step", together, _steps, lambda sizes: {"multi_step": MULTI_STEP, "step_ahead": True}),
    Axis(
        "speculation",
        alone,
        _drafts,
        lambda sizes: {
            "speculative_config": {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1, "adaptive": False}
        },
    ),
    Axis("tensor-parallel", alone, _devices, lambda sizes: {"tensor_parallel_size": 2}),
)

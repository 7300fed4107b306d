"""Engine with random weights: start, and decoding with several row counts, by one step per dispatch or several."""

import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from tempfile import TemporaryDirectory

from device_report import machine as machines
from device_report.kernels import KERNELS
from device_report.points import Figures, Latest, Point
from device_report.served import Served
from device_report.shapes import Load, choose_load
from device_report.trace import busy_share
from jaxserve.api.metrics import EngineStats
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import MULTI_STEP_ROWS

machine = machines.with_jax

MAX_TRACED_LEN = 512  # tokens of a row besides the prompt, until the trace has ended


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """Yield each shape's start, then its rows, with several steps if there are programs; last, a whole start."""
    load = choose_load(device, dry_run)
    bench = Bench(device, load)
    for shape in load.models():
        yield Point("start", {"shape": shape}, partial(bench.start, shape))
        for rows in load.rows:
            for multi_step in load.multi_steps if rows <= MULTI_STEP_ROWS else (1,):
                settings = {"shape": shape, "rows": rows, "multi_step": multi_step}
                yield Point("serve", settings, partial(bench.serve, shape, rows, multi_step))
    for shape in load.whole_starts:
        needs_s = partial(bench.whole_start_s, shape)
        yield Point("whole start", {"shape": shape}, partial(bench.whole_start, shape), needs_s)


def _page_size(device: str, model: Mapping[str, int]) -> int:
    """Return the page size that an engine chooses for the device's kernel."""
    head_dim = model["hidden_size"] // model["num_attention_heads"]
    return default_page_size(KERNELS[device].backend, Heads(model["num_key_value_heads"], head_dim), "bfloat16")


class Bench:
    """Measures points; keeps the last model."""

    def __init__(self, device: str, load: Load) -> None:
        self._device, self._load = device, load
        self._served: Latest[str, Served] = Latest(self._serve)
        # compile time of all programs of a shape, estimated from the compiled ones
        self._compile_s: dict[str, float] = {}

    def _serve(self, shape: str) -> Served:
        load, most = self._load, max(self._load.rows)
        model, quantization = load.models()[shape]
        page_size = _page_size(self._device, model)
        row_len = load.prompt_len + load.output_len + MAX_TRACED_LEN
        served = Served(
            self._device,
            model,
            quantization=quantization,
            max_num_seqs=most,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_model_len=min(row_len, model["max_position_embeddings"]),
            page_size=page_size,
            num_pages=most * -(-row_len // page_size),
            enable_prefix_caching=False,
        )
        self._compile_s[shape] = statistics.mean(served.compile_s.values()) * served.num_programs
        return served

    def start(self, shape: str) -> Figures:
        """Return the seconds of an engine's work before its first request, and the work left for the background."""
        served = self._served.get(shape)
        return {
            "num_params": served.num_params,
            "backend": served.backend,
            "weights_s": served.weights_s,
            "first_programs_s": served.first_programs_s,
            "compile_s": dict(served.compile_s),
            "num_programs": served.num_programs,
            "num_pages": served.schedule.num_pages,
        }

    def whole_start_s(self, shape: str) -> float:
        """Return the expected time to compile all programs."""
        return self._compile_s.get(shape, 0.0)

    def whole_start(self, shape: str) -> Figures:
        """Return the seconds until all programs of another engine are compiled."""
        runner = self._served.get(shape).runner
        runner.programs.table.clear()
        started = time.perf_counter()
        runner.programs.warm_up("all")
        return {"num_programs": self._served.get(shape).num_programs, "warm_up_s": time.perf_counter() - started}

    def serve(self, shape: str, rows: int, multi_step: int | str) -> Figures:
        """Return the round with median speed, and the device's wait time in a later, traced one."""
        served = self._served.get(shape)
        served.compile_for(self._load.rows, any(steps != 1 for steps in self._load.multi_steps))
        engine = served.engine(multi_step=multi_step)
        self._round(engine, rows, seed=0)
        rounds = [self._round(engine, rows, seed) for seed in range(1, 1 + self._load.rounds)]
        rounds.sort(key=lambda figures: figures["decode_tok_per_s"])
        speeds = [figures["decode_tok_per_s"] for figures in rounds]
        median = rounds[len(rounds) // 2]
        share, source = self._busy_share(engine, rows)
        gap = median["stats_gap"] if share is None else 1 - share
        return {**median, "decode_tok_per_s_of_rounds": speeds, "host_gap": gap, "host_gap_by": source}

    def _round(self, engine: DrivenEngine, rows: int, seed: int) -> Figures:
        """Run all requests from first to last; return the step figures while every row decoded."""
        started, begin = time.perf_counter(), dataclasses.replace(engine.stats)
        outputs = self._queue(engine, rows, self._load.output_len, seed)
        prefill_s = _until_all_decode(engine, outputs)
        for _ in range(2):  # step statistics are written while a later step runs
            engine.step()
        before, step_ms = dataclasses.replace(engine.stats), {}
        while _longest(outputs) < self._load.output_len:
            engine.step()
            if (step := engine.last_step) is not None:
                step_ms[step.step_id] = step.wall_ms / step.num_steps
        decoded = engine.stats.since(before)
        while engine.has_unfinished():
            engine.step()
        total_s = time.perf_counter() - started
        engine.step()
        whole = engine.stats.since(begin)
        return {
            "output_tok_per_s": rows * self._load.output_len / total_s,
            "padding_share": whole.padding_share,
            "prefill_s": prefill_s,
            "prefill_tok_per_s": rows * self._load.prompt_len / prefill_s,
            "median_step_ms": statistics.median(step_ms.values()),
            **_per_step(decoded),
        }

    def _busy_share(self, engine: DrivenEngine, rows: int) -> tuple[float | None, str]:
        """Return the fraction of time in which the device was busy, from its trace: see `busy_share`."""
        outputs = self._queue(engine, rows, self._load.output_len + MAX_TRACED_LEN, seed=99)
        _until_all_decode(engine, outputs)
        with TemporaryDirectory() as directory:
            found = busy_share(engine, self._load.traced_steps, directory)
        for row in range(rows):
            engine.abort(str(row))
        engine.step()
        return found

    def _queue(self, engine: DrivenEngine, rows: int, output_len: int, seed: int) -> list[RequestOutput]:
        rng = random.Random(f"{rows} {seed}")
        longest = engine.schedule.max_model_len - self._load.prompt_len
        params = SamplingParams(temperature=0, max_tokens=min(output_len, longest), ignore_eos=True)
        vocab_size = engine.arch.vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(self._load.prompt_len)] for _ in range(rows)]
        return [engine.add_request(str(row), prompt, params) for row, prompt in enumerate(prompts)]


def _until_all_decode(engine: DrivenEngine, outputs: list[RequestOutput]) -> float:
    """Step until every row has its first token; return the seconds."""
    started = time.perf_counter()
    while not all(output.outputs[0].token_ids for output in outputs):
        engine.step()
    return time.perf_counter() - started


def _longest(outputs: list[RequestOutput]) -> int:
    return max(len(output.outputs[0].token_ids) for output in outputs)


def _per_step(stats: EngineStats) -> Figures:
    """Return means per step while every row decoded, by the steps' wall times."""
    num_steps, seconds = stats.num_steps, stats.wall_ms / 1e3
    return {
        "decode_tok_per_s": stats.num_decode_tokens / seconds,
        "tflop_per_s": stats.flops / seconds / 1e12,
        "num_steps": num_steps,
        "num_dispatches": stats.num_dispatches,
        "step_ms": stats.wall_ms / num_steps,
        "host_ms": stats.host_ms / num_steps,
        "stats_gap": 1 - min(1.0, stats.device_ms / stats.wall_ms),
        "decode_padding_share": stats.padding_share,
        "weight_bytes": stats.weight_bytes / num_steps,
        "kv_bytes": stats.kv_bytes / num_steps,
        "flops": stats.flops / num_steps,
    }

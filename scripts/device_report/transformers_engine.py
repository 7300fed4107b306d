"""transformers with the same shapes and load: `generate` for few rows, continuous batching for many.

Few: a static cache and `torch.compile(mode="reduce-overhead")`, which records CUDA graphs. Many: `generate_batch`.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from device_report import machine as machines
from device_report.points import Figures, Latest, Point, UnavailableError
from device_report.shapes import FULL_LOAD, TINY_LOAD, Load

machine = machines.with_torch

MAX_STATIC_ROWS = 8
NEVER = -1  # no token has this id: nothing ends a sequence early


def points(_: str, dry_run: bool) -> Iterator[Point]:
    """Yield every shape with every row count."""
    load = TINY_LOAD if dry_run else FULL_LOAD
    bench = Bench(load, dry_run)
    for shape in load.shapes:
        for rows in load.rows:
            few = rows <= (1 if dry_run else MAX_STATIC_ROWS)
            measure = partial(bench.static if few else bench.continuous, shape, rows)
            yield Point("generate" if few else "generate_batch", {"shape": shape, "rows": rows}, measure)


class Bench:
    """Measures points; keeps the last model."""

    def __init__(self, load: Load, dry_run: bool) -> None:
        self._load, self._dry_run = load, dry_run
        self._models: Latest[str, Any] = Latest(self._model)

    def _model(self, shape: str) -> Any:
        try:
            import torch  # noqa: PLC0415 - may be missing
            import transformers  # noqa: PLC0415
        except ImportError as error:
            raise UnavailableError(f"transformers: {error}") from None
        if not self._dry_run and not torch.cuda.is_available():
            raise UnavailableError("torch sees no GPU")
        if self._dry_run:
            torch.set_num_threads(1)  # more threads than free cores make a tiny model much slower
        config = transformers.LlamaConfig(**self._load.shapes[shape], bos_token_id=None, eos_token_id=None)
        with torch.device("cpu" if self._dry_run else "cuda"):
            options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
            return transformers.AutoModelForCausalLM.from_config(config, **options).eval()

    def _prompts(self, rows: int, seed: int) -> list[list[int]]:
        rng, vocab_size = random.Random(f"{rows} {seed}"), min(s["vocab_size"] for s in self._load.shapes.values())
        return [[rng.randrange(vocab_size) for _ in range(self._load.prompt_len)] for _ in range(rows)]

    def static(self, shape: str, rows: int) -> Figures:
        """Measure times between tokens as they reach the host, after two rounds that compile and record."""
        model = self._models.get(shape)
        import torch  # noqa: PLC0415 - may be missing
        import transformers  # noqa: PLC0415

        n = self._load.output_len
        config = transformers.GenerationConfig(
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            compile_config=transformers.CompileConfig(mode="reduce-overhead", fullgraph=False),
            disable_compile=self._dry_run,
        )
        ids = torch.tensor(self._prompts(rows, 0), device=model.device)

        def generate() -> tuple[float, list[float]]:
            clock = _Clock()
            started = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
            return time.perf_counter() - started, clock.times[1:]  # the first belongs to the prompt

        warm_up_s = sum(generate()[0] for _ in range(1 if self._dry_run else 2))
        rounds = [_figures(*generate(), rows, n) for _ in range(self._load.rounds)]
        mode = "static cache" if self._dry_run else "static cache, torch.compile, reduce-overhead"
        return {**_median(rounds), "warm_up_s": warm_up_s, "mode": mode}

    def continuous(self, shape: str, rows: int) -> Figures:
        """Run all requests together; the stretch in which every row decodes follows from their time stamps."""
        model = self._models.get(shape)
        import transformers  # noqa: PLC0415 - may be missing

        n, options = self._load.output_len, {}
        config = transformers.GenerationConfig(max_new_tokens=n, do_sample=False, pad_token_id=0, eos_token_id=NEVER)
        if self._dry_run:
            options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
                num_blocks=16, max_batch_tokens=64
            )

        def generate(seed: int) -> Figures:
            prompts = self._prompts(rows, seed)  # different in each round, because it caches prefixes
            started = time.perf_counter()
            outputs = model.generate_batch(
                prompts, generation_config=config, record_timestamps=True, persistent_manager=True, **options
            )
            total_s = time.perf_counter() - started
            lens = sorted({len(output.generated_tokens) for output in outputs.values()})
            if len(outputs) != rows or lens != [n]:
                raise RuntimeError(f"{rows} outputs of {n} tokens were to come, got {len(outputs)} of {lens}")
            return {"output_tok_per_s": rows * n / total_s, **_stretch([o.timestamps for o in outputs.values()])}

        generate(0)
        rounds = [generate(seed) for seed in range(1, 1 + self._load.rounds)]
        # The manager has a fixed number of rows; not every version can drop it.
        getattr(model, "destroy_cached_continuous_batching_manager", lambda: None)()
        return {**_median(rounds), "mode": "continuous batching, sdpa"}


class _Clock:
    """Streamer that notes when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _ids: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _figures(total_s: float, times: list[float], rows: int, num_tokens: int) -> Figures:
    steps = [b - a for a, b in itertools.pairwise(times)]
    return {
        "output_tok_per_s": rows * num_tokens / total_s,
        "decode_tok_per_s": rows * len(steps) / sum(steps),
        "step_ms": 1e3 * sum(steps) / len(steps),
        "median_step_ms": 1e3 * statistics.median(steps),
    }


def _stretch(stamps: list[list[float] | None]) -> Figures:
    """Return tokens per second from the last row's first token to the first row's last."""
    known = [times for times in stamps if times]
    if len(known) < len(stamps):
        return {}
    start, end = max(times[0] for times in known), min(times[-1] for times in known)
    count = sum(start < time_s <= end for times in known for time_s in times)
    return {"decode_tok_per_s": count / (end - start)} if count and end > start else {}


def _median(rounds: list[Figures]) -> Figures:
    """Return the round with median speed."""
    return sorted(rounds, key=lambda figures: figures["output_tok_per_s"])[len(rounds) // 2]

"""Process with one engine: one JSON message per line, on stdin and stdout.

    python -m baselines.worker ADAPTER CHECKPOINT CACHE_DIR OPTIONS

It reports when it is ready, then answers {"prompts": [[id]], "output_lens": [int]} with {"token_ids": [[id]], "wall_s"}
and {"prompt": str, "picture": [rows, columns, seed], "num_tokens": int} with {"text": str, "wall_s"}; both perhaps with
{"error"}. The engine's own output goes to stderr.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray


def main() -> None:
    replies = _take_stdout()
    adapter, checkpoint, cache_dir, options = sys.argv[1:]
    started = time.perf_counter()
    module = importlib.import_module(f"baselines.{adapter}")
    engine = module.Engine(Path(checkpoint), Path(cache_dir), **json.loads(options))
    ready = {
        "load_s": time.perf_counter() - started,
        "versions": engine.versions,
        "note": engine.note,
        "num_warm_up": engine.num_warm_up,
    }
    _send(replies, ready)
    for line in sys.stdin:
        _send(replies, _answer(engine, json.loads(line)))


def _take_stdout() -> TextIO:
    """Return stdout for messages only: later writes to stdout, even by native code, go to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


class Baseline(Protocol):
    """An engine as wrapped by its module."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Sequence[Sequence[int]]:
        """Return greedy continuations of all prompts, with exactly the given lengths."""


class PictureBaseline(Protocol):
    """An engine that takes pictures."""

    def describe(self, prompt: str, pixels: NDArray[np.uint8], num_tokens: int) -> str:
        """Return the greedy continuation of a prompt with one picture, in exactly this number of tokens."""


def _described(engine: PictureBaseline, message: dict[str, Any]) -> dict[str, Any]:
    *size, seed = message["picture"]
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    started = time.perf_counter()
    text = engine.describe(message["prompt"], pixels, message["num_tokens"])
    return {"text": text, "wall_s": time.perf_counter() - started}


def _answer(engine: Any, message: dict[str, Any]) -> dict[str, Any]:
    try:
        if "picture" in message:
            return _described(engine, message)
        started = time.perf_counter()
        token_ids = engine.generate(message["prompts"], message["output_lens"])
        wall_s = time.perf_counter() - started
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    lens = [len(ids) for ids in token_ids]
    if lens != message["output_lens"]:
        return {"error": f"every output must have the length that was asked for, got {lens}"}
    return {"token_ids": [[int(i) for i in ids] for ids in token_ids], "wall_s": wall_s}


def _send(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()

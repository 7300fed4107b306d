"""Time to the first token of a prompt with a picture, in jaxserve and in OpenVINO GenAI, on the same checkpoint.

    python scripts/bench_pictures.py DIR/vl --make     # writes a random-weight checkpoint; needs torch
    python scripts/bench_pictures.py DIR/vl --openvino ~/ov/bin/python --rounds 3 --json out.json

Float32, greedy, one request at a time. Each engine runs in a separate process, which is stopped while the other one is
measured. Every round has a new picture of random pixels, so that no cache finds it; the time includes preprocessing,
but no decoding of files. The texts of 8 tokens are compared.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from statistics import median
from typing import Any

from baselines.picture_checkpoint import PROMPT, make_checkpoint
from baselines.process import Worker
from baselines.registry import PICTURE_ENGINES, worker_command, worker_environment

NUM_TOKENS = 8


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the workers
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--make", action="store_true", help="write a random checkpoint there, if there is none")
    parser.add_argument("--openvino", type=Path, help="interpreter that has openvino-genai and optimum-intel")
    parser.add_argument("--side", type=int, default=448, help="rows and columns of the picture")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    args = parser.parse_args()
    if args.make and not (args.checkpoint / "config.json").exists():
        print(f"{args.checkpoint}: {make_checkpoint(args.checkpoint):,} parameters")
    pythons = {"jaxserve": sys.executable, **({"openvino": str(args.openvino.absolute())} if args.openvino else {})}
    checkpoint = args.checkpoint.absolute()
    folder = checkpoint.with_name(f"{checkpoint.name}.baselines")
    folder.mkdir(exist_ok=True)
    workers = {
        name: Worker(
            worker_command(PICTURE_ENGINES[name], python, checkpoint, {}),
            worker_environment(PICTURE_ENGINES[name], python),
            folder / f"{name}-pictures.log",
            1800,
        )
        for name, python in pythons.items()
    }
    try:
        report = compare(workers, args.side, args.rounds)
    finally:
        for worker in workers.values():
            worker.end()
    if args.json:
        args.json.write_text(json.dumps({"load": os.getloadavg(), **report}, indent=1) + "\n")


def compare(workers: dict[str, Worker], side: int, num_rounds: int) -> dict[str, Any]:
    """Measure engines in turns; print and return times in seconds, and the ratio of the medians."""
    engines = {name: worker.load() for name, worker in workers.items()}

    def ask(worker: Worker, seed: int, num_tokens: int) -> dict[str, Any]:
        return worker.ask({"prompt": PROMPT, "picture": [side, side, seed], "num_tokens": num_tokens})

    texts = {name: ask(worker, 0, NUM_TOKENS)["text"] for name, worker in workers.items()}  # also warms up
    runs: list[dict[str, Any]] = []
    for number in range(1, num_rounds + 1):
        for name, worker in workers.items():
            answer = ask(worker, number, 1)
            figures = {key: answer[key] for key in ("wall_s", "cores_used", "noise_share")}
            runs.append({"engine": name, "round": number, **figures})
            print(f"{name} {number}: {answer['wall_s']:.3f} s, others {answer['noise_share'] or 0:.0%}", flush=True)
    times = {name: [run["wall_s"] for run in runs if run["engine"] == name] for name in workers}
    medians, lowest = ({name: find(each) for name, each in times.items()} for find in (median, min))
    for name, each in medians.items():
        ratios = each / medians["jaxserve"], lowest[name] / lowest["jaxserve"]
        print(
            f"{name}: median {each:.3f} s, {ratios[0]:.2f} times jaxserve's; lowest {lowest[name]:.3f} s, "
            f"{ratios[1]:.2f} times; {engines[name]['note']}, {texts[name]!r}"
        )
    return {
        "side": side,
        "engines": engines,
        "medians_s": medians,
        "lowest_s": lowest,
        "texts": texts,
        "runs": runs,
    }


if __name__ == "__main__":
    main()

"""Turn a TPU report into block sizes for its kernel, if they were faster.

python scripts/tpu_report.py --part tuning && python scripts/tuned_sizes.py
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from device_report.document import Document, Entry
from jaxserve.pallas_kernels.pallas_kernel import TunedSizes, read_entries
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import KERNEL

RESULTS = Path(__file__).parent / "results" / "tpu.json"
GAIN = 0.03  # minimum relative gain in the time of decode and prefill, with equal weights: less may be chance
TIMES = ("decode_us", "prefill_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="the report")
    parser.add_argument("--to", type=Path, default=KERNEL.settings.folder, metavar="DIR", help="of the tables")
    args = parser.parse_args()
    document = Document.read(args.json, "tpu")
    if document.dry_run and args.to == KERNEL.settings.folder:
        raise SystemExit(f"{args.json} must be of a TPU, not of a dry run; name another folder with --to to try this")
    for chip, entries in faster(document).items():
        path = args.to / f"{chip}.json"
        write_entries(path, entries)
        for entry in entries:
            print(json.dumps({"table": str(path), "shape": entry.shape, "sizes": entry.sizes, **entry.evidence}))


def faster(document: Document) -> dict[str, list[TunedSizes]]:
    """Return, by chip, the best sizes for each shape class with sizes better than those in use."""
    found: dict[str, list[TunedSizes]] = {}
    points = document.points("tuning")
    machine = next((content["machine"] for _, stage, content in document.stages() if stage == "tuning"), {})
    for before in (point for point in points if point["change"] == "none"):
        best = min((x for x in points if x["shape"] == before["shape"]), key=lambda x: _time(x, before))
        if _time(best, before) <= 1 - GAIN:
            times = {name: best[name] for name in TIMES} | {f"{name}_before": before[name] for name in TIMES}
            evidence = {**times, "at": best["at"], **machine}
            found.setdefault(best["chip"], []).append(TunedSizes(best["shape"], best["sizes"], evidence))
    return found


def write_entries(path: Path, entries: Sequence[TunedSizes]) -> None:
    """Add entries to a chip's file, replacing those for the same shapes."""
    shapes = [entry.shape for entry in entries]
    kept = [entry for entry in read_entries(path) if entry.shape not in shapes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"entries": [asdict(x) for x in (*kept, *entries)]}, indent=1) + "\n", encoding="utf-8")
    read_entries.cache_clear()


def _time(point: Entry, before: Entry) -> float:
    """Return the time relative to the previous one."""
    return sum(point[name] / before[name] for name in TIMES) / len(TIMES)


if __name__ == "__main__":
    main()

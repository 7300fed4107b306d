"""TPU report with tiny sizes on a CPU, the kernel in the interpreter; parts shared with GPUs are tested there."""

import importlib
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import tpu_report
import tuned_sizes
from device_report.document import Document
from device_report.grid import FULL_TPU, TINY_TPU, choose_grid
from device_report.kernels import KERNELS
from device_report.points import Latest
from device_report.shapes import choose_load
from jaxserve.pallas_kernels.pallas_kernel import read_entries

SCRIPT = Path(tpu_report.__file__)
MACHINE = {"device": "test", "platform": "tpu", "driver": None, "versions": {"python": "3"}}
MIXED = {"rows": 2, "chunk": 3, "context": 9, "page_size": 16, "group": 1, "backend": "xla"}


def run_script(*args: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *args], check=True, capture_output=True, text=True, timeout=500)
    return done.stdout


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path, str]:
    """Run the parts for TPUs; return the document, the folder of its plots and the last output."""
    directory = tmp_path_factory.mktemp("tpu")
    options = ("--dry-run", "--json", str(directory / "tpu.json"))
    run_script("--part", "peak_rates", *options)
    for only in ("transformers ids", "backend=mosaic_tpu"):
        run_script("--part", "correctness", "--only", only, *options)
    run_script("--part", "tuning", *options)
    printed = run_script("--part", "attention", "--plots", str(directory / "plots"), *options)
    return Document(directory / "tpu.json", "tpu", dry_run=True), directory, printed


def entries(document: Document, stage: str) -> list[dict[str, Any]]:
    return [e for _, name, content in document.stages() if name == stage for e in content["points"].values()]


@pytest.mark.full
@pytest.mark.exhaustive
def test_the_kernel_is_right_and_so_are_the_ids(dry_run: tuple[Document, Path, str]) -> None:
    document, _, printed = dry_run
    cases = entries(document, "correctness")
    assert [case["case"] for case in cases] == list(KERNELS["tpu"].tiny_cases)
    assert all(case.get("passed", "unavailable" in case) for case in cases), cases
    assert document.points("kernel"), "at least one case runs"
    (ids,) = entries(document, "parity")
    assert ids["passed"], ids
    assert ids["num_equal"] == ids["num_requests"] == 2
    assert "ids == transformers'" in printed


@pytest.mark.full
@pytest.mark.exhaustive
def test_attention_is_measured_beside_that_of_xla(dry_run: tuple[Document, Path, str]) -> None:
    document, directory, printed = dry_run
    for kind in ("decode", "prefill", "mixed"):
        points = document.points(kind)
        assert [point["backend"] for point in points] == ["mosaic_tpu", "xla"]
        assert f"{kind} us" in printed
    assert not any("failed" in entry for entry in entries(document, "attention"))
    assert {path.name for path in (directory / "plots").iterdir()} == {"tpu_roofline.png", "tpu_decode.png"}
    with pytest.raises(SystemExit, match="of a GPU"):
        Document(directory / "tpu.json", "gpu", dry_run=False)


@pytest.mark.full
@pytest.mark.exhaustive
def test_sizes_that_were_faster_become_those_in_use(dry_run: tuple[Document, Path, str], tmp_path: Path) -> None:
    document, _, printed = dry_run
    before, changed = document.points("tuning")
    assert (before["change"], changed["change"]) == ("none", "work_item_bytes=1048576")
    assert "changed size" in printed
    assert {k: v for k, v in changed["sizes"].items() if before["sizes"][k] != v} == {"work_item_bytes": 2**20}
    report = Document(tmp_path / "tpu.json", "tpu", dry_run=False)
    report.begin("tuning", "tuning", MACHINE)
    for name, times in {"same": (98.0, 98.0), "slower": (70.0, 140.0), "faster": (90.0, 99.0)}.items():
        times_by_name = dict(zip(tuned_sizes.TIMES, times, strict=True))
        report.put("tuning", "tuning", "before", {**before, **dict.fromkeys(tuned_sizes.TIMES, 100.0)})
        report.put("tuning", "tuning", "changed", {**changed, **times_by_name})
        found = tuned_sizes.faster(report)
        assert bool(found) == (name == "faster"), name
    (entry,) = found["none"]
    assert (entry.shape, entry.sizes) == (before["shape"], changed["sizes"])
    assert (entry.evidence["decode_us"], entry.evidence["decode_us_before"]) == (90.0, 100.0)


@pytest.mark.full
@pytest.mark.exhaustive
def test_tables_of_sizes_are_written(dry_run: tuple[Document, Path, str], tmp_path: Path) -> None:
    """Sizes are written to the named folder; results of other devices never become sizes of TPUs."""
    document, directory, _ = dry_run
    script = [sys.executable, tuned_sizes.__file__, "--json", str(directory / "tpu.json")]
    refused = subprocess.run(script, check=False, capture_output=True, text=True, timeout=100)
    assert "must be of a TPU, not of a dry run" in refused.stderr
    written = subprocess.run([*script, "--to", str(tmp_path)], check=True, capture_output=True, text=True, timeout=100)
    expected = tuned_sizes.faster(document).get("none", [])
    assert [json.loads(line)["sizes"] for line in written.stdout.splitlines()] == [entry.sizes for entry in expected]
    assert list(read_entries(tmp_path / "none.json")) == expected


def test_each_measurement_has_the_memory_for_itself() -> None:
    class Itself:
        def __init__(self) -> None:
            self.itself = self

    latest = Latest(lambda _: Itself())
    first = weakref.ref(latest.get(1))
    latest.get(2)
    assert first() is None


def test_every_stage_is_there_and_knows_the_device() -> None:
    for stage in (stage for stages in tpu_report.PARTS.values() for stage in stages):
        module = importlib.import_module(f"device_report.{stage.name}")
        names = [point.name for point in module.points("tpu", False)]
        assert names
        assert len(names) == len(set(names)), stage


def test_all_cases_are_checked_in_both_precisions() -> None:
    names = {case.name for case in KERNELS["tpu"].cases}
    assert len(names) == len(KERNELS["tpu"].cases)
    assert {case.kv_dtype for case in KERNELS["tpu"].cases} >= {"float32", "bfloat16", "int8"}
    assert choose_grid("tpu", False) is FULL_TPU
    assert choose_grid("tpu", True) is TINY_TPU
    assert max(choose_load("tpu", False).rows) < max(choose_load("gpu", False).rows)


def test_mixed_steps_are_a_share_of_what_bounds_them(tmp_path: Path) -> None:
    document = Document(tmp_path / "tpu.json", "tpu", dry_run=False)
    for stage, name, point in (
        ("peak_rates", "copy", {"kind": "copy", "gb_per_s": 4.0}),
        ("peak_rates", "gemm", {"kind": "gemm", "tflop_per_s": 2.0}),
        ("attention", "memory", {"kind": "mixed", "us": 1.0, "kv_gb_per_s": 3.0, "tflop_per_s": 1.0, **MIXED}),
        ("attention", "products", {"kind": "mixed", "us": 1.0, "kv_gb_per_s": 1.0, "tflop_per_s": 1.8, **MIXED}),
    ):
        document.begin(stage, stage, MACHINE)
        document.put(stage, stage, name, point)
    assert [point["fraction_of_roofline"] for point in document.points("mixed")] == [0.75, 0.9]


def test_a_machine_without_a_tpu_is_refused(tmp_path: Path) -> None:
    args = [sys.executable, str(SCRIPT), "--part", "peak_rates", "--json", str(tmp_path / "tpu.json")]
    done = subprocess.run(args, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "peak_rates needs a TPU, and there is only" in done.stderr
    assert not (tmp_path / "tpu.json").exists()

"""Figures as Markdown tables, and as one line per new point."""

from collections.abc import Iterable, Sequence
from typing import Any

from device_report.document import Document, Entry
from device_report.grid import WIDE

Row = Sequence[Any]

_BRIEF = (
    "gb_per_s",
    "tflop_per_s",
    "us",
    "decode_us",
    "prefill_us",
    "kv_gb_per_s",
    "max_error",
    "max_logprob_difference",
    "summary",
    "passed",
    "first_programs_s",
    "warm_up_s",
    "decode_tok_per_s",
    "output_tok_per_s",
    "step_ms",
    "host_gap",
    "unavailable",
    "failed",
)


def brief(entry: Entry) -> str:
    """Return a point's most important figures."""
    return ", ".join(f"{name} {number(entry[name])}" for name in _BRIEF if name in entry)[:300]


def render(document: Document) -> str:
    """Return all non-empty tables, below the device."""
    blocks = [_machines(document), _peak_rates(document), _correctness(document)]
    blocks += [
        _decode(document),
        _prefill(document),
        _mixed(document),
        _tuning(document),
        _starts(document),
        _serving(document),
        _gaps(document),
    ]
    return "\n\n".join(filter(None, blocks))


def number(value: Any) -> str:
    """Format three significant digits, more only before the point; other values unchanged."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def share(value: float | None) -> str:
    """Format a fraction as percent."""
    return "-" if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def table(header: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table with aligned columns; nothing without rows."""
    cells = [[number(cell) for cell in row] for row in (header, *rows)]
    if len(cells) == 1:
        return ""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _machines(document: Document) -> str:
    title = "Dry run on a CPU: tiny sizes, no figure means anything." if document.dry_run else "Measured on"
    seen = {}
    for _, _, content in document.stages():
        machine = content["machine"]
        if machine["device"]:
            versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
            seen[f"{machine['device']}, driver {machine['driver']}, {versions}"] = None
    return "\n".join([title, *seen])


def _peak_rates(document: Document) -> str:
    bandwidths = [(f"{p['kind']}, {p['mib']} MiB", number(p["gb_per_s"]) + " GB/s") for p in _bandwidths(document)]
    products = document.points("gemm")
    rows = [(f"matrix product, {p['size']}, {p['dtype']}", number(p["tflop_per_s"]) + " TFLOP/s") for p in products]
    return table(("peak", "rate"), bandwidths + rows)


def _bandwidths(document: Document) -> list[Entry]:
    return document.points("copy", "add", "read")


def _correctness(document: Document) -> str:
    rows = []
    kernels = document.points("kernel")
    for backend in dict.fromkeys(p["backend"] for p in kernels):
        cases = [p for p in kernels if p["backend"] == backend]
        if cases:
            passed = sum(p["passed"] for p in cases)
            worst = max(cases, key=lambda p: float("inf") if p["max_error"] is None else p["max_error"])
            errors = f"largest error {number(worst['max_error'])} ({worst['case']})"
            rows.append((f"cases of {backend}", f"{passed} of {len(cases)} pass, {errors}"))
    for p in document.points("invariant"):
        equal = f"{p['num_equal']} of {p['num_requests']} equal"
        difference = f"log probabilities differ by {number(p['max_logprob_difference'])}"
        rows.append((p["case"], f"{'passes' if p['passed'] else 'FAILS'}: {equal}, {difference}"))
    for p in document.points("transformers ids"):
        verdict = "passes" if p["passed"] else "FAILS"
        equal = f"{p['num_equal']} of {p['num_requests']} equal"
        rows.append(("ids == transformers'", f"{verdict}: {equal}, {number(p['max_lead'])} below the likeliest"))
    rows += [(p["tests"], p["summary"]) for p in document.points("suite")]
    return table(("correctness", "found"), rows)


def _decode(document: Document) -> str:
    """Return our figures per rows, context, group, page and pool, next to others at the same sizes, in bfloat16."""
    others = {
        kind: {(p["rows"], p["context"], p["group"]): p["us"] for p in document.points(kind)}
        for kind in ("sdpa decode", "flex decode")
    }
    rows = []
    for p in document.points("decode"):
        sizes = p["rows"], p["context"], p["group"]
        rates = p["us"], p["kv_gb_per_s"], share(p.get("fraction_of_copy")), p.get("speed_up")
        beside = (times.get(sizes) for times in others.values())
        rows.append((*sizes, p["page_size"], p["kv_dtype"], p["backend"], *rates, *beside))
    ours = ("decode us", "GB/s of KV", "of copy", f"x {WIDE}")
    return table(("rows", "context", "group", "page", "pool", "backend", *ours, "SDPA us", "FlexAttention us"), rows)


def _prefill(document: Document) -> str:
    sdpa = {(p["chunk"], p["context"], p["group"]): p["tflop_per_s"] for p in document.points("sdpa prefill")}
    rows = []
    for p in document.points("prefill"):
        sizes = p["chunk"], p["context"], p["group"]
        rates = number(p["us"]), number(p["tflop_per_s"]), share(p.get("fraction_of_gemm"))
        rows.append((*sizes, p["page_size"], p["backend"], *rates, sdpa.get(sizes)))
    header = ("chunk", "context", "group", "page", "backend", "prefill us", "TFLOP/s", "of GEMM", "SDPA TFLOP/s")
    return table(header, rows)


def _mixed(document: Document) -> str:
    """Return rows with one token and one with many, all with the same context."""
    rows = []
    for p in document.points("mixed"):
        sizes = p["rows"], p["chunk"], p["context"], p["group"], p["page_size"], p["backend"]
        rows.append((*sizes, p["us"], p["kv_gb_per_s"], p["tflop_per_s"], share(p.get("fraction_of_roofline"))))
    header = ("rows", "chunk", "context", "group", "page", "backend", "mixed us", "GB/s of KV", "TFLOP/s")
    return table((*header, "of roofline"), rows)


def _tuning(document: Document) -> str:
    """Return block sizes: those in use, and with one changed."""
    rows = []
    for p in document.points("tuning"):
        shape = p["num_kv_heads"], p["group"], p["head_dim"], p["kv_dtype"]
        rows.append((*shape, p["change"], p["decode_us"], p["prefill_us"]))
    return table(("kv heads", "group", "head_dim", "pool", "changed size", "decode us", "prefill us"), rows)


def _starts(document: Document) -> str:
    whole = {p["shape"]: p["warm_up_s"] for p in document.points("whole start")}
    rows = [
        (p["shape"], p["backend"], p["weights_s"], p["first_programs_s"], p["num_programs"], whole.get(p["shape"]))
        for p in document.points("start")
    ]
    return table(("model", "attention", "weights s", "first programs s", "programs", "all programs s"), rows)


def _serving(document: Document) -> str:
    """Return output tokens per second: while all rows decode, and overall."""
    rows: list[Row] = []
    for p in document.points("serve"):
        padding = share(p["decode_padding_share"])
        roofline = share(p.get("fraction_of_bandwidth_roofline"))
        name = f"jaxserve, multi-step {p['multi_step']}"
        rates = p["decode_tok_per_s"], p["output_tok_per_s"], p["step_ms"]
        rows.append((p["shape"], p["rows"], name, *rates, roofline, share(p["host_gap"]), padding))
    for p in document.points("generate", "generate_batch"):
        rates = p.get("decode_tok_per_s"), p["output_tok_per_s"], p.get("step_ms")
        rows.append((p["shape"], p["rows"], f"transformers, {p['mode']}", *rates, None, None, None))
    rows.sort(key=lambda row: (row[0], row[1]))
    header = ("model", "rows", "engine", "decode tok/s", "all tok/s", "step ms", "of roofline", "host gap", "padding")
    return table(header, rows)


def _gaps(document: Document) -> str:
    """Return a table of points without figures, and the reasons."""
    rows = []
    for _, stage, content in document.stages():
        for name, entry in content["points"].items():
            reason = entry.get("failed") or entry.get("unavailable")
            if reason:
                rows.append((stage, name, reason.splitlines()[0][:150]))
        if content["left_out"]:
            rows.append((stage, f"{len(content['left_out'])} points", "no time was left; --missing measures them"))
    return table(("without figures", "point", "why"), rows)

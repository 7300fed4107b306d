"""A plan as JSON and as text. Keys carry their units."""

from dataclasses import asdict
from typing import Any

from jaxserve.bench.tables import Row, align, number
from jaxserve.planner.plan import Plan, Speed
from jaxserve.planner.program import StepProgram

Json = dict[str, Any]


def build_report(plan: Plan) -> Json:
    """All figures; null where nothing is compiled or predicted."""
    memory, schedule, speed = plan.memory, plan.schedule, plan.speed
    programs = [program for program in (plan.largest, plan.decode) if program is not None]
    return {
        "model": plan.model,
        "target": plan.target.name,
        "num_chips": plan.target.num_chips,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "attention_backend": plan.backend,
        "max_model_len": schedule.max_model_len,
        "max_num_seqs": schedule.max_num_seqs,
        "max_num_batched_tokens": schedule.max_num_batched_tokens,
        "page_size": schedule.page_size,
        "fits": plan.fits,
        "missing_bytes_per_chip": memory.missing,
        "limit_bytes_per_chip": memory.limit,
        "weights_bytes_per_chip": memory.weights,
        "slots_bytes_per_chip": memory.slots,
        "temp_bytes_per_chip": plan.largest and plan.largest.temp_bytes,
        "decode_temp_bytes_per_chip": plan.decode and plan.decode.temp_bytes,
        "kv_bytes_per_chip": memory.num_pages * memory.page,
        "kv_tokens": plan.kv_tokens,
        "num_requests": plan.num_requests,
        "collectives_per_layer": plan.decode and _collectives(plan.decode),
        "collectives_per_layer_largest": plan.largest and _collectives(plan.largest),
        "compiled_tokens": [program.num_tokens for program in programs],
        "compile_s": sum(program.compile_s for program in programs) if programs else None,
        "context_len": speed and speed.context_tokens,
        "step_ms": speed and speed.step_ms,
        "tokens_per_s": speed and speed.tokens_per_s,
        "prompt_len": speed and speed.prompt_tokens,
        "ttft_ms": speed and speed.ttft_ms,
    }


def _collectives(program: StepProgram) -> list[Json]:
    return [asdict(exchange) for exchange in program.collectives]


def render(plan: Plan) -> str:
    """The same for people."""
    blocks = [_header(plan), align(_memory(plan))]
    if plan.largest is not None and plan.decode is not None:
        blocks.append(_programs(plan.num_layers, plan.largest, plan.decode))
    if plan.speed is not None:
        blocks += [_speed_header(plan.speed), align(_steps(plan.speed), header=True)]
    return "\n\n".join(blocks)


def _header(plan: Plan) -> str:
    schedule = plan.schedule
    verdict = "fits" if plan.fits else f"does not fit: each chip lacks {_gb(plan.memory.missing)}"
    return (
        f"{plan.model} in {plan.dtype} on {plan.target.name}: {verdict}\n"
        f"requests of up to {schedule.max_model_len} tokens, {schedule.max_num_seqs} of them in a step of up to "
        f"{schedule.max_num_batched_tokens} tokens"
    )


def _memory(plan: Plan) -> list[Row]:
    memory, sheet = plan.memory, plan.target.sheet
    rows: list[Row] = []
    if memory.limit is not None and sheet is not None:
        rows.append(("memory XLA takes", f"{_gb(memory.limit)} of {_gb(sheet.memory_bytes)} on each chip"))
    rows += [("weights", _gb(memory.weights)), ("slots of requests", _gb(memory.slots))]
    if plan.largest is not None and plan.decode is not None:
        rows.append(("temporaries", f"{_gb(plan.largest.temp_bytes)} in a step of {plan.largest.num_tokens} tokens"))
        rows.append(("", f"{_gb(plan.decode.temp_bytes)} with {plan.schedule.max_num_seqs} rows in decode"))
    rows.append(("keys and values", f"{_gb(memory.num_pages * memory.page)} in {plan.kv_dtype}"))
    rows.append(("", f"{plan.kv_tokens} tokens, {plan.num_requests} requests of full length"))
    return rows


def _programs(num_layers: int, largest: StepProgram, decode: StepProgram) -> str:
    lines = [
        f"found by compiling both steps for the target, all {num_layers} layers, "
        f"in {largest.compile_s + decode.compile_s:.0f} s"
    ]
    if decode.collectives:
        exchanges = f"{_exchanges(decode)} in decode, {_exchanges(largest)} in the largest step"
        lines.append(f"between the chips, per layer: {exchanges}")
    return "\n".join(lines)


def _exchanges(program: StepProgram) -> str:
    return ", ".join(f"{x.count} {x.kind} ({x.num_bytes / 1e6:.3g} MB)" for x in program.collectives)


def _speed_header(speed: Speed) -> str:
    return (
        "predicted, not measured: no step is faster than the data sheet's bandwidth, FLOP/s and links allow\n"
        f"TTFT of {speed.prompt_tokens} tokens alone {number(speed.ttft_ms)} ms; "
        f"decode after {speed.context_tokens} tokens a row:"
    )


def _steps(speed: Speed) -> list[Row]:
    rows = [(str(count), number(ms), number(speed.tokens_per_s[count])) for count, ms in speed.step_ms.items()]
    return [("rows", "ms a step", "tokens/s"), *rows]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"

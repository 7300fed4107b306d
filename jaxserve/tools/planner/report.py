"""Reports of plans as JSON and as text. Keys end in their units."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jaxserve.assembly.memory import CPU_POOL_FRACTION
from jaxserve.tools.figures.tables import Row, align, number
from jaxserve.tools.planner.images import ImageCost
from jaxserve.tools.planner.plan import Plan, Speed
from jaxserve.tools.planner.program import StepProgram
from jaxserve.tools.planner.remedies import Remedy
from jaxserve.tools.planner.speed import StageTimes
from jaxserve.tools.planner.sweep import Candidate, cheapest

Json = dict[str, Any]
_NOT_COMPILED = "nothing was compiled: temporaries of steps and exchanges between chips are not counted"


def build_report(plan: Plan) -> Json:
    """Return all figures of a plan; null if nothing is compiled or predicted."""
    memory, schedule, speed, times = plan.memory, plan.schedule, plan.speed, plan.program_s
    programs = [program for program in (plan.largest, plan.decode) if program is not None]
    return {
        "model": plan.model,
        "target": plan.target.name,
        "num_chips": plan.num_chips,
        "num_devices": plan.num_chips * plan.target.devices_per_chip,
        "pipeline_parallel_size": max(len(plan.stages), 1),
        "stages": [
            {
                "num_layers": stage.num_layers,
                "weights_bytes_per_chip": stage.weights,
                "decode_ms": stage.decode_ms,
                "prefill_ms": stage.prefill_ms,
            }
            for stage in plan.stages
        ],
        "expert_parallel_size": plan.num_expert_shards,
        "enable_dp_attention": schedule.num_data_shards > 1,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "kv_dtype": plan.kv_dtype,
        "attention_backend": plan.backend,
        "max_model_len": schedule.max_model_len,
        "max_num_seqs": schedule.max_num_seqs,
        "max_num_batched_tokens": schedule.max_num_batched_tokens,
        "page_size": schedule.page_size,
        "fits": plan.fits,
        "missing_bytes_per_chip": memory.missing,
        "fitting_max_model_len": plan.fitting_len,
        "remedies": [
            {
                "options": remedy.options,
                "missing_bytes_per_chip": remedy.missing,
                "fitting_max_model_len": remedy.fitting_len,
            }
            for remedy in plan.remedies
        ],
        "limit_bytes_per_chip": memory.limit,
        "weights_bytes_per_chip": memory.weights,
        "images": plan.images
        and {
            "tower_bytes_per_chip": plan.images.tower_bytes,
            "cache_bytes_per_chip": memory.images,
            "cache_embeddings": schedule.num_encoder_rows,
            "programs": list(map(asdict, plan.images.costs)),
        },
        "slots_bytes_per_chip": memory.slots,
        "reserve_bytes_per_chip": memory.reserve,
        "outside_bytes_per_chip": memory.outside,
        "temp_bytes_per_chip": plan.largest and _temp_bytes(plan, plan.largest),
        "decode_temp_bytes_per_chip": plan.decode and _temp_bytes(plan, plan.decode),
        "kv_bytes_per_chip": memory.num_pages * memory.page,
        "kv_tokens": plan.kv_tokens,
        "host_bytes": plan.host and plan.host.size,
        "host_tokens": plan.host and plan.host.num_tokens(schedule),
        "host_bytes_per_request": plan.host and plan.host.request_bytes(schedule),
        "num_requests": plan.num_requests,
        "collectives_per_layer": plan.decode and list(map(asdict, plan.decode.collectives)),
        "collectives_per_layer_largest": plan.largest and list(map(asdict, plan.largest.collectives)),
        "collective_bytes_per_step": plan.decode and _step_bytes(plan, plan.decode),
        "collective_bytes_per_step_largest": plan.largest and _step_bytes(plan, plan.largest),
        "compiled_tokens": [program.num_tokens for program in programs],
        "compile_s": plan.compile_s,
        "programs": times and {"count": len(times), "total_s": sum(times.values()), "seconds": times},
        "compiler_estimate_ms": [program.estimate_ms for program in programs],
        "context_len": speed and speed.context_tokens,
        "step_ms": speed and speed.step_ms,
        "tokens_per_s": speed and speed.tokens_per_s,
        "max_joules_per_token": speed and _max_joules_per_token(plan, speed),
        "prompt_len": speed and speed.prompt_tokens,
        "ttft_ms": speed and speed.ttft_ms,
        "capacity": capacity_curve(plan),
    }


def _max_joules_per_token(plan: Plan, speed: Speed) -> dict[int, float] | None:
    """Return the energy per output token at the chips' maximum power, by rows in a step; None if that is unknown."""
    sheet = plan.target.sheet
    if sheet is None or sheet.watts is None:
        return None
    return {rows: sheet.watts * plan.num_chips / rate for rows, rate in speed.tokens_per_s.items() if rate}


def capacity_curve(plan: Plan) -> dict[int, int]:
    """Return the number of requests that fit in the pool at the same time, by length in tokens."""
    longest = plan.schedule.max_model_len
    lengths = {length for power in range(7, longest.bit_length()) if (length := 1 << power) <= longest} | {longest}
    return {length: plan.capacity(length) for length in sorted(lengths)}


def _temp_bytes(plan: Plan, program: StepProgram) -> int:
    """Return a program's temporary memory per chip; a chip may have several devices."""
    return program.temp_bytes * plan.target.devices_per_chip


def _step_bytes(plan: Plan, program: StepProgram) -> int:
    """Return the size of a step's collective results on one device, over all layers."""
    return plan.num_layers * sum(exchange.num_bytes for exchange in program.collectives)


def render(plan: Plan) -> str:
    """Return a plan as readable text."""
    blocks = [_header(plan), align(_memory(plan))]
    if plan.largest is not None and plan.decode is not None:
        blocks.append(_programs(plan, plan.largest, plan.decode))
    elif plan.speed is not None:
        blocks.append(_NOT_COMPILED)
    if plan.program_s is not None:
        blocks += _warm_up(plan.program_s)
    if plan.speed is not None:
        blocks += _speed(plan, plan.speed)
    if plan.images is not None:
        blocks += _images(plan.images.costs)
    if len(plan.stages) > 1:
        blocks += _stages(plan)
    return "\n\n".join(blocks)


def _header(plan: Plan) -> str:
    """Return the lines with model, target, verdict and step sizes."""
    schedule = plan.schedule
    stored = f"{plan.dtype}, weights in {plan.quantization}," if plan.quantization else plan.dtype
    where = plan.target.name
    if len(plan.stages) > 1:
        where += f" for each of {len(plan.stages)} pipeline stages"
    if plan.num_expert_shards > 1:
        what = "experts" if schedule.num_data_shards == 1 else "experts and of the requests"
        where += f", each device with 1 of {plan.num_expert_shards} shards of the {what}"
    return (
        f"{plan.model} in {stored} on {where}: {_verdict(plan)}\n"
        f"requests of up to {schedule.max_model_len} tokens, {schedule.max_num_seqs} of them in a step of up to "
        f"{schedule.max_num_batched_tokens} tokens"
    )


def _verdict(plan: Plan) -> str:
    """Return whether the model fits, and if not what is missing and what would help."""
    if plan.fits:
        return "fits"
    if plan.target.sheet is not None:
        who = "each chip"
    else:
        who = "the pool" if plan.memory.missing_in_pool else "this machine"
    if plan.fitting_len:
        remedy = f"--max-model-len {plan.fitting_len} is the largest that fits"
    else:
        remedy = "; ".join(["no --max-model-len fits", *map(_advice, plan.remedies)])
    return f"does not fit: {who} lacks {_gb(plan.memory.missing)}; {remedy}"


def _advice(remedy: Remedy) -> str:
    """Return a clause with a remedy's options and their effect."""
    if remedy.fitting_len is None:
        return f"{remedy.options} fits"
    if remedy.fits:
        return f"{remedy.options} fits with --max-model-len {remedy.fitting_len}"
    return f"with {remedy.options} it lacks {_gb(remedy.missing)}"


def _memory(plan: Plan) -> list[Row]:
    """Return the table rows that divide each chip's memory."""
    memory, sheet = plan.memory, plan.target.sheet
    rows: list[Row] = []
    if sheet is not None:
        rows.append(("memory XLA takes", f"{_gb(memory.limit)} of {_gb(sheet.memory_bytes)} on each chip"))
    else:
        rows.append(("this machine", f"{_gb(memory.limit)}, the pool has 1/{1 / CPU_POOL_FRACTION:.0f} of it at most"))
    rows.append(("weights", _gb(memory.weights)))
    if plan.images is not None:
        rows.append(("", f"of it {_gb(plan.images.tower_bytes)} for the vision tower"))
    rows.append(("slots of requests", _gb(memory.slots)))
    if memory.images:
        num_rows = plan.schedule.num_encoder_rows
        rows.append(("", f"of it {_gb(memory.images)} for {num_rows} embeddings of images"))
    if sheet is not None:
        rows.append(("reserve of steps", f"{_gb(memory.reserve)} that the engine keeps for their temporaries"))
    if plan.largest is not None and plan.decode is not None:
        largest, decode = (_gb(_temp_bytes(plan, program)) for program in (plan.largest, plan.decode))
        largest_temp = f"of it {largest}" if sheet is not None else largest
        rows.append(("", f"{largest_temp} in a step of {plan.largest.num_tokens} tokens, as compiled"))
        rows.append(("", f"{decode} with {plan.schedule.max_num_seqs} decoding rows"))
        if memory.beyond_reserve:
            rows.append(("beyond the reserve", _gb(memory.beyond_reserve)))
    rows.append(("keys and values", f"{_gb(memory.num_pages * memory.page)} in {plan.kv_dtype}"))
    rows.append(("", f"{plan.kv_tokens} tokens, {plan.num_requests} requests of full length"))
    if not plan.fits:
        rows.append(("", f"{_gb(memory.request)} would hold one request of full length"))
    if plan.host is not None:
        request = plan.host.request_bytes(plan.schedule)
        more = f"{plan.host.num_tokens(plan.schedule)} more tokens, {plan.host.size // request} requests of full length"
        rows.append(("host memory", f"{_gb(plan.host.size)} for pages: {more}"))
        rows.append(("", f"{_gb(request)} of it for a swapped-out request of full length"))
    return [*rows, *_unused(plan)]


def _unused(plan: Plan) -> list[Row]:
    """Return the table rows for memory that the engine does not take."""
    memory, rows = plan.memory, list[Row]()
    if memory.outside:
        reason = "beyond --gpu-memory-utilization"
        if plan.target.sheet is None:
            reason = "for temporaries of steps and for other programs"
        rows.append(("left free", f"{_gb(memory.outside)} {reason}"))
    if memory.rest > 0:
        rows.append(("rest", f"{_gb(memory.rest)}, less than a page of keys and values"))
    return rows


def _programs(plan: Plan, largest: StepProgram, decode: StepProgram) -> str:
    """Return the lines about the compiled steps: time to compile, and exchanges between chips."""
    lines = [f"found by compiling both steps for the target, all {plan.num_layers} layers, in {plan.compile_s:.0f} s"]
    if decode.collectives:
        exchanges = f"{_exchanges(decode)} in decode, {_exchanges(largest)} in the largest step"
        lines.append(f"between the chips, per layer: {exchanges}")
        step, most = (_gb(_step_bytes(plan, program)) for program in (decode, largest))
        lines.append(f"in all layers: {step} and {most}")
    return "\n".join(lines)


def _warm_up(program_s: dict[str, float]) -> list[str]:
    """Return the blocks with the engine's programs and the seconds to compile each."""
    total = sum(program_s.values())
    rows = [("program", "s to compile"), *((name, number(seconds)) for name, seconds in program_s.items())]
    return [
        f"the engine has {len(program_s)} programs there, which took {total:.0f} s to compile here, one by one",
        align(rows, header=True),
    ]


def _exchanges(program: StepProgram) -> str:
    """Return a program's collectives per layer, with their number, type and size."""
    return ", ".join(f"{x.count} {x.kind} ({x.num_bytes / 1e6:.3g} MB)" for x in program.collectives)


def _speed(plan: Plan, speed: Speed) -> list[str]:
    """Return the blocks with the predicted speed, and with a row for each number of decoding rows."""
    lines = ["predicted, not measured: no step is faster than the data sheet's bandwidth, FLOP/s and links allow"]
    programs = [program for program in (plan.decode, plan.largest) if program is not None]
    estimates = [f"{number(x.estimate_ms)} ms for {x.num_tokens} tokens" for x in programs if x.estimate_ms is not None]
    if estimates:
        lines.append(f"the compiler's own estimate, each loop counted once, as if of one layer: {', '.join(estimates)}")
    lines.append(
        f"TTFT of {speed.prompt_tokens} tokens alone {number(speed.ttft_ms)} ms; "
        f"decode after {speed.context_tokens} tokens a row:"
    )
    rows = [(str(count), number(ms), number(speed.tokens_per_s[count])) for count, ms in speed.step_ms.items()]
    return ["\n".join(lines), align([("rows", "ms a step", "tokens/s"), *rows], header=True)]


def _images(costs: Sequence[ImageCost]) -> list[str]:
    """Return the blocks with the cost of images, by the tower's programs."""
    is_timed = any(cost.encode_ms is not None for cost in costs)
    header = ("patches", "embeddings", "FLOPs as of text tokens", *(["ms to encode"] if is_timed else []))
    rows = [
        (
            *map(str, (cost.patches, cost.embeddings, cost.text_tokens)),
            *([] if cost.encode_ms is None else [number(cost.encode_ms)]),
        )
        for cost in costs
    ]
    title = "an image that fills a program of the vision tower; each embedding is a token of its prompt"
    return [title, align([header, *rows], header=True)]


def _stages(plan: Plan) -> list[str]:
    """Return the blocks with the pipeline stages, and with the time for which they wait for each other."""
    header = ("stage", "layers", "weights on a chip", "ms a decode step", "ms a full step of prompts")
    rows: list[Row] = [header]
    times: dict[str, list[float]] = {"decode with the most rows": [], "prefill": []}
    for index, stage in enumerate(plan.stages, 1):
        both = [each for each in (stage.decode_ms, stage.prefill_ms) if each is not None]
        for known, each in zip(times.values(), both, strict=False):
            known.append(each)
        row = (str(index), str(stage.num_layers), _gb(stage.weights), *map(number, both))
        rows.append((*row, *[""] * (len(header) - len(row))))
    idle = [f"{100 * StageTimes.idle(each):.1f}% of {name}" for name, each in times.items() if each]
    blocks = [align(rows, header=True)]
    if idle:
        blocks.append(
            f"stages wait for the most expensive one for {' and '.join(idle)}; a prompt alone also has to fill them"
        )
    return ["memory is that of the stage with the least for keys and values", *blocks]


def build_sweep_report(candidates: Sequence[Candidate]) -> Json:
    """Return each target's plan, or the reason why it has none, and the cheapest target that fits."""
    best = cheapest(candidates)
    targets = [
        {
            **(build_report(x.plan) if x.plan else {"target": x.target.name, "reason": x.reason}),
            "usd_per_hour": x.usd_per_hour,
            "usd_per_million_tokens": x.usd_per_million_tokens,
            **({} if x.served is None else {"served": x.served}),
        }
        for x in candidates
    ]
    return {"targets": targets, "cheapest": best and best.target.name}


def render_sweep(candidates: Sequence[Candidate]) -> str:
    """Return a sweep as readable text."""
    has_trace = any(x.served is not None for x in candidates)
    speeds = ("TTFT p50", "TTFT p99", "ITL p50") if has_trace else ("TTFT ms", "rows", "ms a step")
    header = ("target", "fits", "weights", "KV tokens", "requests", *speeds, "tokens/s")
    blocks = [align([(*header, "$/hour", "$/M tokens"), *map(_compared, candidates)], header=True)]
    if any(x.plan and x.plan.speed for x in candidates):
        if any(x.plan and x.plan.speed and x.plan.largest is None for x in candidates):
            blocks.append(_NOT_COMPILED)
        figures = "the trace's TTFT and ITL in ms" if has_trace else "TTFT, ms a step"
        blocks.append(f"{figures}, tokens/s and prices are predicted from data sheets, not measured")
    blocks += [f"{x.target.name}: {x.reason}" for x in candidates if x.reason is not None]
    blocks += [
        f"{x.target.name}: {x.served['too_long']} of {x.served['requests']} requests are too long and not counted"
        for x in candidates
        if x.served is not None and x.served["too_long"]
    ]
    if (best := cheapest(candidates)) is not None:
        blocks.append(f"cheapest that fits: {best.target.name}, ${best.usd_per_hour:.2f} an hour")
    return "\n\n".join(blocks)


def _compared(candidate: Candidate) -> Row:
    """Return a target's table row in a sweep."""
    plan = candidate.plan
    if plan is None:
        return (candidate.target.name, "?", *[""] * 9)
    verdict = "yes" if plan.fits else f"lacks {_gb(plan.memory.missing)}"
    figures = (candidate.target.name, verdict, _gb(plan.memory.weights), str(plan.kv_tokens), str(plan.num_requests))
    if (speed := plan.speed) is None:
        return (*figures, *[""] * 4, _usd(candidate.usd_per_hour), "")
    if (served := candidate.served) is not None:
        ttft_ms, itl_ms = served["ttft_ms"], served["itl_ms"]
        times = (number(ttft_ms["p50"]), number(ttft_ms["p99"]), number(itl_ms["p50"]))
        speeds = (*times, number(served["output_tokens_per_s"]))
        return (*figures, *speeds, _usd(candidate.usd_per_hour), _usd(candidate.usd_per_million_tokens))
    rows = candidate.num_rows
    speeds = (number(speed.ttft_ms), str(rows), number(speed.step_ms[rows]), number(speed.tokens_per_s[rows]))
    return (*figures, *speeds, _usd(candidate.usd_per_hour), _usd(candidate.usd_per_million_tokens))


def _usd(price: float | None) -> str:
    """Format dollars; "" if the price is unknown."""
    return "" if price is None else f"{price:.2f}"


def _gb(num_bytes: int) -> str:
    """Format a size in GB."""
    return f"{num_bytes / 1e9:.2f} GB"

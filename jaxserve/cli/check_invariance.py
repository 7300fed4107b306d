"""Command `jaxserve check-invariance`: compare requests that run alone with the same requests in other settings."""

import dataclasses
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from jaxserve.api.config import EngineConfig
from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import NOT_FLAGS, add_config_flags, config_options, engine_options
from jaxserve.cli.logs import add_log_level
from jaxserve.errors import ConfigError
from jaxserve.tools.invariance.workload import Sizes

_CHOSEN_BY_AXES = (
    *("compile_ahead", "convert", "count_expert_tokens", "enable_prefix_caching", "event_log", "max_model_len"),
    *("max_num_batched_tokens", "max_num_seqs", "model", "multi_step", "num_pages", "page_size", "pooler_config"),
    *("runner", "speculative_config", "step_ahead", "tokenizer"),
)


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve check-invariance`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    add_log_level(parser)
    add_config_flags(parser, "workload", Sizes)
    add_config_flags(parser, "engine", EngineConfig, (*NOT_FLAGS, *_CHOSEN_BY_AXES))


def _run(args: Namespace) -> int:
    """Run the check and print the findings; return 1 if tokens differ, else 0."""
    sizes = Sizes(**config_options(args, "workload"))
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json must name a file in an existing directory, got {args.json}")
    from jaxserve.tools.invariance.check import check_invariance, provide_two_devices  # noqa: PLC0415 - imports jax
    from jaxserve.tools.invariance.tables import line, summary  # noqa: PLC0415 - imports jax

    provide_two_devices()
    options = {"model": args.model, **engine_options(args)}
    findings = check_invariance(options, sizes, report=lambda finding: print(line(finding), flush=True))
    print(summary(findings))
    if args.json is not None:
        rows = [{"grade": finding.grade, **dataclasses.asdict(finding)} for finding in findings]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(finding.grade == "differs" for finding in findings))


COMMAND = Command(
    "check-invariance",
    "compare each request's tokens with its tokens when batched, cached, preempted and so on",
    _add_flags,
    _run,
    usage="%(prog)s [OPTIONS] [MODEL]",
)

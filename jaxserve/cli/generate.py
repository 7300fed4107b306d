"""Command `jaxserve generate`: complete a prompt."""

import dataclasses
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import add_engine_flags, field_helps, flag, help_text
from jaxserve.cli.loading import load_llm, status_line
from jaxserve.cli.logs import add_log_level
from jaxserve.cli.process_flags import add_process_flags
from jaxserve.core.status_line import wait_until_warm
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.api.outputs import RequestOutput

_DEFAULT_MAX_TOKENS = 256
_SAMPLING_FLAGS = {  # SamplingParams fields that take the checkpoint's defaults
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
}
_REPEATED_FLAGS = ("stop", "bad_words")


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve generate`."""
    text = "text to complete, without a chat template; read from standard input if absent or -"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    _add_sampling_flags(parser)
    text = (
        "show live statistics on stderr about once a second (unless the text goes to the same terminal), and a "
        "summary; starts when all programs are compiled"
    )
    parser.add_argument("--stats", action="store_true", help=text)
    add_log_level(parser)
    add_process_flags(parser)
    add_engine_flags(parser, leave_out=("seed",))


def _add_sampling_flags(parser: ArgumentParser) -> None:
    """Add flags for some SamplingParams fields, with help from their docstring."""
    group = parser.add_argument_group("sampling")
    helps = field_helps(SamplingParams)
    text = help_text("maximum number of output tokens", _DEFAULT_MAX_TOKENS)
    group.add_argument("--max-tokens", type=int, default=_DEFAULT_MAX_TOKENS, metavar="INT", help=text)
    for name, kind in _SAMPLING_FLAGS.items():
        text = help_text(helps[name], None if name == "seed" else "the checkpoint's recommendation")
        group.add_argument(flag(name), type=kind, metavar=kind.__name__.upper(), help=text)
    for name in _REPEATED_FLAGS:
        group.add_argument(flag(name), action="append", metavar="STR", help=f"{helps[name]}; may be repeated")


def _run(args: Namespace) -> int:
    """Print the completion of the prompt while it is generated; return 0."""
    prompt = _read_prompt(args.prompt)
    names = ("max_tokens", *_SAMPLING_FLAGS, *_REPEATED_FLAGS)
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    SamplingParams(**given)  # rejects invalid values before the model is loaded
    llm = load_llm(args)
    params = dataclasses.replace(llm.get_default_sampling_params(), **given)
    output = None
    if args.stats:
        wait_until_warm(llm.engine, sys.stderr)  # compilation would distort the measurement
    same_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    with status_line(args.stats and not same_terminal, llm):
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
    print()
    if args.stats and output is not None:
        efficiency = llm.engine.stats.split(llm.engine.peak_rates()).efficiency
        print(f"{_stats(output)}; E {efficiency:.1%}", file=sys.stderr)
    return 0


def _read_prompt(given: str | None) -> str:
    """Return the given prompt, or standard input if it is None or "-"; ConfigError if there is no text."""
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise ConfigError('a prompt is needed: jaxserve generate "Once upon a time", or pipe it in')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input must be {error.encoding} text, but: {error.reason}") from error


def _stats(output: "RequestOutput") -> str:
    """Return a line with a finished request's tokens, rate and latencies."""
    m = output.metrics
    decode = f", {1 / m.tpot_s:.1f} tok/s after the first" if m.tpot_s else ""
    times = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in (("TTFT", m.ttft_s), ("TPOT", m.tpot_s)) if seconds]
    return (
        f"prompt {len(output.prompt_token_ids)} tokens ({m.num_cached_tokens} cached), "
        f"output {m.num_output_tokens} tokens{decode}; {', '.join(times)}; "
        f"ended by {output.outputs[0].finish_reason}"
    )


COMMAND = Command(
    "generate", "complete a prompt and stream the text", _add_flags, _run, usage="%(prog)s [OPTIONS] [PROMPT]"
)

"""Command line: `jaxserve serve`, `generate`, `batch`, `bench`, `convert`, `quantize` and `plan`.

Exit codes: 0 success, for a batch also if some records are errors; 1 no target of a sweep could be planned; 2 invalid
command line or configuration, or a file that cannot be read or written, reported in one line; 75 another process of the
run was lost; 130 interrupted; 141 the reader of the output closed it.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxserve import __version__, interrupts
from jaxserve.bench.flags import add_bench
from jaxserve.config import EngineConfig
from jaxserve.distributed import peers
from jaxserve.errors import ConfigError, PeerLostError, RequestError, did_you_mean, install_extra
from jaxserve.live_stats import LiveStats, wait_until_warm
from jaxserve.planner.flags import PLANNED, add_plan, find_compilers, use_compilers
from jaxserve.quantize.flags import add_quantize, quantize_options
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.auth import Keys
from jaxserve.server.config import ServerConfig
from jaxserve.vllm_options import VLLM_OPTIONS, engine_options

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.outputs import RequestOutput

_NOT_FLAGS = {"skip_tokenizer_init", "forbid_compiles"}  # not useful on a command line
_DIRECTORIES = {"model", "tokenizer", "compilation_cache_dir"}
_DEFAULT_MAX_TOKENS = 256
_PROCESS_FLAGS = {  # arguments of distributed.initialize, in its order
    "coordinator_address": (
        str,
        "HOST:PORT",
        "address at which the others reach process 0; the port must be free on its host",
    ),
    "num_processes": (int, "INT", "number of processes"),
    "process_id": (int, "INT", "number of this process, from 0"),
}
_SAMPLING_FLAGS = {  # flags of `generate`: fields of SamplingParams, with the checkpoint's defaults
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
}
_GROUP_DESCRIPTIONS = {"engine": "An option without a default is None if it is not given."}
_REPEATED_FLAGS = ("stop", "bad_words")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Flags may have underscores, as vLLM's may."""
    args = _parser().parse_args(_with_dashes(sys.argv[1:] if argv is None else argv))
    interrupts.set_hint(args.on_interrupt)
    try:
        with _unwinding_if_others_wait(args):
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (ConfigError, RequestError) as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 2
    except PeerLostError as error:
        print(f"jaxserve: error: {error}{args.on_interrupt}", file=sys.stderr)
        return peers.EXIT_CODE
    except KeyboardInterrupt:
        interrupts.tell()
        return interrupts.EXIT_CODE
    except BrokenPipeError:
        # the interpreter flushes stdout once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"jaxserve: error: {error}{args.on_interrupt}", file=sys.stderr)
        return 2


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """Return the command line with dashes for the underscores in names of flags."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), each) for each in argv[:end]] + [*argv[end:]]


class _Parser(argparse.ArgumentParser):
    """Parser that takes no shortened options, nor do those of its sub-commands: a typo must not pass for another.

    It suggests flags that are like unknown ones.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments of this parser; end the program if some are unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("--")]
            hint = did_you_mean(flags, [name for name in self._option_string_actions if name.startswith("--")])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}; {self.prog} --help lists all")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxserve",
        description="Serve large language models from JAX.",
        epilog="`jaxserve COMMAND --help` describes a command and all its options.",
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    text = "complete one prompt, shown as it comes"
    generate = _add_command(commands, "generate", text, _generate, usage="%(prog)s [OPTIONS] [PROMPT]")
    text = "text to complete, not a chat; - or nothing reads standard input"
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    _add_sampling_flags(generate)
    text = (
        "write a live line to stderr about once a second (unless the text goes to the same terminal), and a summary; "
        "starts when all programs are compiled"
    )
    generate.add_argument("--stats", action="store_true", help=text)
    _add_process_flags(generate)
    _add_engine_flags(generate, leave_out=("seed",))

    text = "serve a model over HTTP with OpenAI's interface (extra: server)"
    serve = _add_command(commands, "serve", text, _serve, usage="%(prog)s [OPTIONS] [MODEL]")
    text = "directory of a checkpoint (default: the embedded model)"
    serve.add_argument("model", nargs="?", metavar="MODEL", help=text)
    _add_config_flags(serve, "server", ServerConfig)
    _add_engine_flags(serve, leave_out=("model",))

    text = "serve a file of OpenAI batch requests; the same command resumes it"
    hint = "; run the same command again to resume"
    batch = _add_command(commands, "batch", text, _batch, hint, usage="%(prog)s [OPTIONS] IN OUT")
    batch.add_argument("input", metavar="IN", help="file of requests: JSON lines in OpenAI's batch format")
    text = "file of results: JSON lines in any order; where it exists, only missing records are added"
    batch.add_argument("output", metavar="OUT", help=text)
    batch.add_argument(
        "--served-model-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names that requests may have in `model` (default: any)",
    )
    text = (
        "write a live line to stderr about once a second, in place of the progress bar; "
        "starts when all programs are compiled"
    )
    batch.add_argument("--stats", action="store_true", help=text)
    text = "spread the requests over engines on the Ray cluster of RAY_ADDRESS, or on a local one (extra: ray)"
    batch.add_argument("--ray", action="store_true", help=text)
    text = "engines on the cluster (default: as many as its GPUs or TPUs have room for; without any, one)"
    batch.add_argument("--ray-actors", type=int, metavar="INT", help=text)
    _add_process_flags(batch)
    _add_engine_flags(batch)

    bench = _add_command(commands, "bench", "measure throughput, or latency under load", _bench)
    _add_process_flags(bench)
    add_bench(bench, partial(_add_engine_flags, leave_out=("tokenizer",)))

    text = "write a Hugging Face checkpoint as an Orbax one, which serves as well, or the reverse"
    nothing = "; nothing is left of what was written"
    convert = _add_command(commands, "convert", text, _convert, nothing)
    convert.add_argument("source", metavar="SRC", help="directory of a checkpoint of either form")
    convert.add_argument("target", metavar="DST", help="directory to write, absent or empty")

    text = "write a checkpoint with quantised weights, in compressed-tensors' layout"
    quantize = _add_command(commands, "quantize", text, _quantize, nothing)
    add_quantize(quantize)

    text = "predict whether a model fits on chips, which need not be there, and how fast they can be at best"
    plan = _add_command(commands, "plan", text, _plan, usage="%(prog)s (--target NAME | --sweep [NAME ...]) [OPTIONS]")
    add_plan(plan)
    not_planned = {field.name for field in dataclasses.fields(EngineConfig)} - PLANNED
    _add_config_flags(plan, "engine", EngineConfig, (*_NOT_FLAGS, *not_planned))
    return parser


def _add_command(
    commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int], hint: str = "", **options: Any
) -> argparse.ArgumentParser:
    """Return the parser of a new command.

    Args:
        commands: sub-parsers of the main parser.
        name: name of the command.
        text: clause that says what it does.
        run: function that runs it.
        hint: end of the message where it is interrupted.
        options: further arguments of the parser.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", **options
    )
    parser.set_defaults(run=run, on_interrupt=hint)
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    helps = _field_helps(SamplingParams)
    text = _help("longest output", _DEFAULT_MAX_TOKENS)
    group.add_argument("--max-tokens", type=int, default=_DEFAULT_MAX_TOKENS, metavar="INT", help=text)
    for name, kind in _SAMPLING_FLAGS.items():
        text = _help(helps[name], None if name == "seed" else "the checkpoint's recommendation")
        group.add_argument(_flag(name), type=kind, metavar=kind.__name__.upper(), help=text)
    for name in _REPEATED_FLAGS:
        group.add_argument(_flag(name), action="append", metavar="STR", help=f"{helps[name]}; may be repeated")


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    text = "run the same command in every process; the first does the work, with the devices of all"
    group = parser.add_argument_group("many processes", text)
    text = "take what is not given of the following from SLURM, Open MPI or the TPU pod"
    group.add_argument("--distributed", action="store_true", help=text)
    for name, (kind, metavar, text) in _PROCESS_FLAGS.items():
        group.add_argument(_flag(name), type=kind, metavar=metavar, help=text)


def _add_engine_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    _add_config_flags(parser, "engine", EngineConfig, (*_NOT_FLAGS, *leave_out))
    _add_vllm_flags(parser)


def _add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for vLLM's options, which help does not show: they have another name here, no effect, or a reason."""
    hints = inspect.get_annotations(EngineConfig, eval_str=True)
    for option in VLLM_OPTIONS:
        kinds = {type(value) for value in option.accepts or ()}
        is_switch = option.switch is not None or bool in kinds or (option.field and hints[option.field] is bool)
        options: dict[str, Any] = {"dest": f"engine.{option.name}", "default": argparse.SUPPRESS}
        options |= {"action": argparse.BooleanOptionalAction} if is_switch else {"type": _literal}
        with contextlib.suppress(argparse.ArgumentError):  # the command has a flag of this name
            parser.add_argument(_flag(option.name), help=argparse.SUPPRESS, **options)


def _literal(text: str) -> Any:
    """Return the value of a JSON literal, and other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _add_config_flags(parser: argparse.ArgumentParser, title: str, config: type, leave_out: Sequence[str] = ()) -> None:
    """Add a flag for every field of a configuration; given values are stored in `args` as "<title>.<field>"."""
    group = parser.add_argument_group(title, _GROUP_DESCRIPTIONS.get(title))
    helps, hints = _field_helps(config), inspect.get_annotations(config, eval_str=True)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        kind = _plain_type(hints[field.name])
        options: dict[str, Any] = {"dest": f"{title}.{field.name}", "default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Sequence:
            options |= {"nargs": "+", "metavar": "STR"}
        else:
            options |= {"type": kind, "metavar": "DIR" if field.name in _DIRECTORIES else kind.__name__.upper()}
        group.add_argument(_flag(field.name), help=_help(helps[field.name], field.default), **options)


def _help(text: str, default: object) -> str:
    if isinstance(default, tuple):  # flags of several values
        default = " ".join(default) or None
    shown = text if default is None else f"{text} (default: {default})"
    return shown.replace("%", "%%")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain_type(hint: Any) -> Any:
    """Return the type without None: `int` for `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def _field_helps(config: type) -> dict[str, str]:
    """Return the description of each attribute in the class's docstring."""
    docs = inspect.cleandoc(config.__doc__ or "")  # a no-op on Python 3.13, which removes the indentation itself
    attributes = re.search(r"Attributes:\n(.*?)(?:\n\n|\Z)", docs, re.DOTALL)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes[1] if attributes else "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def _load(args: argparse.Namespace, **options: Any) -> "LLM":
    from jaxserve.llm import LLM  # noqa: PLC0415 - imports jax, for which --help and wrong flags should not wait

    if _is_distributed(args):
        from jaxserve import distributed  # noqa: PLC0415 - imports jax

        distributed.initialize(*(getattr(args, name) for name in _PROCESS_FLAGS))
    return LLM(**_engine_options(args), **options)


def _is_distributed(args: argparse.Namespace) -> bool:
    return args.distributed or any(getattr(args, name) is not None for name in _PROCESS_FLAGS)


def _unwinding_if_others_wait(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Return a context that unwinds on an interrupt in a run of many processes, so that the others are notified."""
    wait = hasattr(args, "distributed") and _is_distributed(args)
    return interrupts.unwinding() if wait else contextlib.nullcontext()


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return engine_options(_options(args, "engine."))


def _options(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): v for name, v in vars(args).items() if name.startswith(prefix)}


def _live_stats(wanted: bool, llm: "LLM") -> contextlib.AbstractContextManager[object]:
    return LiveStats(llm.engine, sys.stderr) if wanted else contextlib.nullcontext()


def _generate(args: argparse.Namespace) -> int:
    prompt = _read_prompt(args.prompt)
    names = ("max_tokens", *_SAMPLING_FLAGS, *_REPEATED_FLAGS)
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    SamplingParams(**given)  # rejects invalid values before the model is loaded
    llm = _load(args)
    params = dataclasses.replace(llm.get_default_sampling_params(), **given)
    output = None
    if args.stats:
        wait_until_warm(llm.engine, sys.stderr)  # compilation would distort the measurement
    same_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    with _live_stats(args.stats and not same_terminal, llm):
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
    print()
    if args.stats and output is not None:
        efficiency = llm.engine.stats.split(llm.engine.peak_rates()).efficiency
        print(f"{_stats(output)}; E {efficiency:.1%}", file=sys.stderr)
    return 0


def _read_prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise ConfigError('a prompt is needed: jaxserve generate "Once upon a time", or pipe it in')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input must be {error.encoding} text, but: {error.reason}") from error


def _stats(output: "RequestOutput") -> str:
    m = output.metrics
    decode = f", {1 / m.tpot_s:.1f} tok/s after the first" if m.tpot_s else ""
    times = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in (("TTFT", m.ttft_s), ("TPOT", m.tpot_s)) if seconds]
    return (
        f"prompt {len(output.prompt_token_ids)} tokens ({m.num_cached_tokens} cached), "
        f"output {m.num_output_tokens} tokens{decode}; {', '.join(times)}; "
        f"ended by {output.outputs[0].finish_reason}"
    )


def _serve(args: argparse.Namespace) -> int:
    options: dict[str, Any] = _options(args, "server.")
    config = ServerConfig(**options)
    try:
        from jaxserve.server.serve import listen, serve  # noqa: PLC0415 - needs an extra
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("jaxserve"):
            raise
        raise ConfigError(f"jaxserve serve needs {error.name}; {install_extra('server')}") from error
    Keys.of(config.api_key, config.api_key_file)  # wrong ones are told before the model is loaded, as is a taken port
    with listen(config) as sock:
        serve(_load_engine(args), config, sock, on_start=_tell_url)
    return 0


def _tell_url(url: str) -> None:
    print(f"jaxserve: serving at {url}", file=sys.stderr, flush=True)


def _load_engine(args: argparse.Namespace) -> "Engine":
    from jaxserve.engine.engine import Engine  # noqa: PLC0415 - imports jax

    return Engine(EngineConfig(model=args.model, **_engine_options(args)))


def _batch(args: argparse.Namespace) -> int:
    from jaxserve.openai.batch_files import find_finished, run_batch  # noqa: PLC0415 - fcntl, which not every system has

    if args.ray_actors is not None and not args.ray:
        raise ConfigError("--ray-actors needs --ray")
    if args.ray and args.stats:
        raise ConfigError("--stats shows the steps of one engine, and --ray runs several; leave one of them out")
    if args.ray and _is_distributed(args):
        raise ConfigError("--ray runs engines of one process each; leave it out, or the flags of many processes")
    summary = None
    if not _is_distributed(args):  # the other processes would wait for this one's engine
        summary = find_finished(args.input, args.output, EngineConfig(**_engine_options(args)).seed)
    if summary is None:
        with _batch_engine(args) as engine:
            names, use_tqdm = args.served_model_name, not args.stats
            summary = run_batch(engine, args.input, args.output, model_names=names, use_tqdm=use_tqdm)
    resumed = f" ({summary.num_resumed} from before)" if summary.num_resumed else ""
    print(
        f"{args.output}: {summary.num_records} records{resumed}, {summary.num_errors} errors; "
        f"{summary.completion_tokens} tokens in {summary.elapsed_s:.1f} s",
        file=sys.stderr,
    )
    return 0


@contextlib.contextmanager
def _batch_engine(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the engine for a batch: one in this process, or a fleet on Ray."""
    if not args.ray:
        llm = _load(args)
        with _live_stats(args.stats, llm):
            yield llm
        return
    from jaxserve.fleet.ray_fleet import ray_fleet  # noqa: PLC0415 - as in _load

    with interrupts.unwinding(), ray_fleet(args.ray_actors, **_engine_options(args)) as fleet:
        yield fleet


def _bench(args: argparse.Namespace) -> int:
    from jaxserve.bench.command import read_job, read_server, run_job, run_remote_job  # noqa: PLC0415 - imports jax

    job, remote = read_job(args), read_server(args, _engine_options(args))
    if remote is not None:
        run_remote_job(*remote, job)
        return 0
    run_job(_load(args, skip_tokenizer_init=True).engine, job)
    return 0


def _convert(args: argparse.Namespace) -> int:
    import jax  # noqa: PLC0415 - as in _load

    from jaxserve import weights  # noqa: PLC0415 - imports jax
    from jaxserve.models import registry  # noqa: PLC0415 - imports jax

    jax.config.update("jax_platforms", "cpu")  # leave accelerators to processes that serve
    try:
        arch = registry.from_hf_config(weights.read_config(args.source))
        with interrupts.unwinding():
            weights.convert(args.source, args.target, registry.param_specs(arch), schemes=arch.schemes, use_tqdm=True)
    except weights.CheckpointError as error:
        raise ConfigError(str(error)) from error
    return 0


def _quantize(args: argparse.Namespace) -> int:
    options = quantize_options(args)
    from jaxserve import weights  # noqa: PLC0415 - imports jax
    from jaxserve.quantize.checkpoint import quantize_checkpoint  # noqa: PLC0415 - imports jax

    try:
        with interrupts.unwinding():
            done = quantize_checkpoint(args.source, args.target, options, use_tqdm=True)
    except weights.CheckpointError as error:
        raise ConfigError(str(error)) from error
    groups = f" in groups of {done.group_size}" if done.group_size else ""
    errors = list(done.errors.values())
    of = "outputs" if options.kind.is_calibrated else "weights"
    print(
        f"{args.target}: {options.scheme}{groups}, {done.num_bytes / 1e6:.1f} MB; squared error of {of} "
        f"{sum(errors) / len(errors):.2e}, at most {max(errors):.2e}",
        file=sys.stderr,
    )
    return 0


def _plan(args: argparse.Namespace) -> int:
    use_compilers(find_compilers(args.compilers))
    from jaxserve.planner.command import run_plan  # noqa: PLC0415 - imports jax

    return run_plan(args, _engine_options(args))

"""Command `jaxserve quantize`: write a checkpoint with quantised weights."""

import sys
from argparse import ArgumentParser, Namespace

from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import add_config_flags, config_options
from jaxserve.system import signals
from jaxserve.tools.quantizer.scheme import SCHEMES, QuantizeOptions

_GROUP = "quantization"


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve quantize`."""
    parser.add_argument("source", metavar="MODEL", help="directory with an unquantised checkpoint")
    parser.add_argument("target", metavar="OUT", help="directory to write, absent or empty")
    text = "; ".join(f"{name}: {scheme.summary}" for name, scheme in SCHEMES.items())
    parser.add_argument("--scheme", required=True, choices=list(SCHEMES), help=text)
    add_config_flags(parser, _GROUP, QuantizeOptions, ("scheme", "max_shard_bytes"))


def _run(args: Namespace) -> int:
    """Quantise the checkpoint and print a summary to stderr; return 0."""
    options = QuantizeOptions(args.scheme, **config_options(args, _GROUP))
    from jaxserve.models.registry import config_errors  # noqa: PLC0415 - imports jax
    from jaxserve.tools.quantizer.checkpoint import quantize_checkpoint  # noqa: PLC0415 - imports jax

    with config_errors(), signals.unwinding():
        done = quantize_checkpoint(args.source, args.target, options, use_tqdm=True)
    groups = f" in groups of {done.group_size}" if done.group_size else ""
    errors = list(done.errors.values())
    compared = "outputs" if options.kind.is_calibrated else "weights"
    print(
        f"{args.target}: {options.scheme}{groups}, {done.num_bytes / 1e6:.1f} MB; squared error of {compared} "
        f"{sum(errors) / len(errors):.2e}, at most {max(errors):.2e}",
        file=sys.stderr,
    )
    return 0


COMMAND = Command(
    "quantize",
    "quantise a checkpoint's weights, in the compressed-tensors format",
    _add_flags,
    _run,
    on_interrupt="; the partial output was deleted",
)

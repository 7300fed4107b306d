"""Command `jaxserve quantize`: write a checkpoint with quantised weights."""

import sys
from argparse import Namespace

from jaxserve.cli.command import Command
from jaxserve.errors import ConfigError
from jaxserve.system import signals
from jaxserve.tools.quantizer.flags import add_quantize, quantize_options


def _run(args: Namespace) -> int:
    options = quantize_options(args)
    from jaxserve import weights  # noqa: PLC0415 - imports jax
    from jaxserve.tools.quantizer.checkpoint import quantize_checkpoint  # noqa: PLC0415 - imports jax

    try:
        with signals.unwinding():
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


COMMAND = Command(
    "quantize",
    "quantise a checkpoint's weights, in the compressed-tensors format",
    add_quantize,
    _run,
    on_interrupt="; the partial output was deleted",
)

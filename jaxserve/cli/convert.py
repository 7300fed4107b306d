"""Command `jaxserve convert`: convert a checkpoint between safetensors and Orbax."""

from argparse import ArgumentParser, Namespace

from jaxserve.cli.command import Command
from jaxserve.system import signals


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve convert`."""
    parser.add_argument("source", metavar="SRC", help="checkpoint directory, safetensors or Orbax")
    parser.add_argument("target", metavar="DST", help="directory to write, absent or empty")


def _run(args: Namespace) -> int:
    """Convert the checkpoint; return 0."""
    import jax  # noqa: PLC0415 - slows the start of every command

    from jaxserve import weights  # noqa: PLC0415 - imports jax
    from jaxserve.models import registry  # noqa: PLC0415 - imports jax

    jax.config.update("jax_platforms", "cpu")  # leave accelerators to processes that serve
    with registry.config_errors(), signals.unwinding():
        arch = registry.from_hf_config(weights.read_config(args.source))
        weights.convert(args.source, args.target, registry.param_specs(arch), schemes=arch.schemes, use_tqdm=True)
    return 0


COMMAND = Command(
    "convert",
    "convert a checkpoint between safetensors and Orbax",
    _add_flags,
    _run,
    on_interrupt="; the partial output was deleted",
)

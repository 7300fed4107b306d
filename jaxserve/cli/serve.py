"""Command `jaxserve serve`: serve a model over HTTP."""

import logging
import sys
from argparse import ArgumentParser, Namespace

from jaxserve.api.config import EngineConfig
from jaxserve.api.vllm_options import SERVER_OPTIONS, server_options
from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import (
    add_config_flags,
    add_engine_flags,
    add_vllm_flags,
    config_options,
    engine_options,
    flag_that_may_hold_path,
)
from jaxserve.cli.loading import require_model
from jaxserve.cli.logs import add_log_level
from jaxserve.errors import ConfigError, install_extra
from jaxserve.server.auth import Keys
from jaxserve.server.config import ServerConfig
from jaxserve.server.sockets import is_reachable, listen

logger = logging.getLogger(__name__)


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve serve`."""
    text = "checkpoint directory or GGUF file (default: the embedded model)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL")
    add_log_level(parser, default="info")
    add_config_flags(parser, "server", ServerConfig)
    add_vllm_flags(parser, "server", SERVER_OPTIONS)
    add_engine_flags(parser, leave_out=("model",))


def _run(args: Namespace) -> int:
    """Serve until a signal comes; return 0."""
    if None not in (args.model, args.model_flag) and args.model != args.model_flag:
        raise ConfigError(f"--model must be MODEL, {args.model}, or be left out, got {args.model_flag}")
    model = args.model_flag if args.model is None else args.model
    if model is None and (name := flag_that_may_hold_path(args)) is not None:
        raise ConfigError(
            f"MODEL must come before flags with several values, or after --: {name} took all values after it, and the "
            f"last one may be MODEL; if it is not, repeat {name} for each value"
        )
    config = ServerConfig(**server_options(config_options(args, "server")))
    engine_config = EngineConfig(model=model, **engine_options(args))
    require_model(vars(engine_config))
    keys = Keys.read(config.api_key, config.api_key_file)  # wrong keys, and a taken port, fail before the model loads
    with listen(config) as sock:
        if not keys and is_reachable(sock):
            logger.warning("other machines can reach the server without a key; set --api-key, or --host 127.0.0.1")
        try:
            from jaxserve.server.serve import serve  # noqa: PLC0415 - needs an extra, and imports jax
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("jaxserve"):
                raise
            raise ConfigError(f"jaxserve serve needs {error.name}; {install_extra('server')}") from error
        from jaxserve.assembly.engine import Engine  # noqa: PLC0415 - imports jax

        serve(Engine(engine_config), config, sock, on_start=_print_url)
    return 0


def _print_url(url: str) -> None:
    print(f"jaxserve: serving at {url}", file=sys.stderr, flush=True)


COMMAND = Command(
    "serve",
    "serve a model over HTTP with OpenAI's interface (extra: server)",
    _add_flags,
    _run,
    usage="%(prog)s [OPTIONS] [MODEL]",
)

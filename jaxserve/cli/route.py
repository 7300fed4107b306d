"""Command `jaxserve route`: give requests to many servers over HTTP."""

import logging
import sys
from argparse import ArgumentParser, Namespace

from jaxserve.cli.command import Command
from jaxserve.cli.config_flags import add_config_flags, config_options
from jaxserve.cli.logs import add_log_level
from jaxserve.errors import ConfigError, install_extra
from jaxserve.routing.config import RouterConfig
from jaxserve.server.sockets import is_reachable, listen

logger = logging.getLogger(__name__)


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve route`."""
    text = "server's address, such as http://10.0.0.5:8000, or unix:PATH"
    parser.add_argument("replicas", nargs="+", metavar="URL", help=text)
    add_log_level(parser, default="info")
    add_config_flags(parser, "router", RouterConfig, leave_out=("replicas",))


def _run(args: Namespace) -> int:
    """Route requests until a signal comes; return 0."""
    config = RouterConfig(replicas=args.replicas, **config_options(args, "router"))
    with listen(config) as sock:
        if is_reachable(sock):
            logger.warning("other machines can reach the router; the servers must check keys")
        try:
            from jaxserve.routing.app import serve  # noqa: PLC0415 - needs an extra
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("jaxserve"):
                raise
            raise ConfigError(f"jaxserve route needs {error.name}; {install_extra('router')}") from error
        serve(config, sock, on_start=_print_url)
    return 0


def _print_url(url: str) -> None:
    print(f"jaxserve: routing at {url}", file=sys.stderr, flush=True)


COMMAND = Command("route", "give requests to many servers over HTTP (extra: router)", _add_flags, _run)

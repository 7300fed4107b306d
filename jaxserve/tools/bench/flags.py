"""Flags of `jaxserve bench`. The imports are light, so that a wrong flag fails immediately."""

import argparse
from collections.abc import Callable

DEFAULT_VOCAB_SIZE = 1000
AddEngineFlags = Callable[[argparse.ArgumentParser], None]

_OFFLINE = "throughput with all requests queued at the start"
_SERVE = "latency with requests that arrive at given times, whether or not earlier ones have ended"


def add_bench(bench: argparse.ArgumentParser, add_engine_flags: AddEngineFlags) -> None:
    """Add `offline` and `serve` to the parser of `jaxserve bench`."""
    kinds = bench.add_subparsers(required=True, metavar="KIND", dest="kind")
    usage = "%(prog)s [OPTIONS]"
    text = f"Measure an engine: {_OFFLINE}."
    offline = kinds.add_parser("offline", help=_OFFLINE, description=text, usage=usage)
    _add_workload(offline, "mixed-64")
    text = "number of runs; the median run is shown"
    offline.add_argument("--rounds", type=int, default=1, metavar="INT", help=text)
    text = f"Measure an engine or a server: {_SERVE}."
    serve = kinds.add_parser("serve", help=_SERVE, description=text, usage=usage)
    _add_workload(serve, "poisson-128")
    _add_load(serve)
    _add_server(serve)
    for parser in (offline, serve):
        _add_results(parser)
        add_engine_flags(parser)


def _add_workload(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags that choose the workload; `default` is a built-in one's name."""
    text = f"name of a built-in workload, or a JSON file with lengths and arrival times (default: {default})"
    parser.add_argument("--workload", default=default, metavar="NAME|FILE", help=text)
    text = "number of requests; a larger number repeats the workload with new prompts (default: the workload's)"
    parser.add_argument("--num-requests", "--num-prompts", type=int, metavar="INT", help=text)


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the flags for arrivals, concurrency and SLOs."""
    text = "Poisson arrivals per second, one run per rate; inf: all at the start (default: the workload's arrivals)"
    parser.add_argument("--rate", "--rates", "--request-rate", dest="rates", metavar="R[,R...]", help=text)
    text = "seed for Poisson arrivals (default: 0)"
    parser.add_argument("--arrival-seed", type=int, metavar="INT", help=text)
    text = "factor for the workload's arrival times (default: 1)"
    parser.add_argument("--time-scale", type=float, metavar="FLOAT", help=text)
    text = "maximum number of unfinished requests; the next one arrives when one of them ends (default: no limit)"
    parser.add_argument("--max-concurrency", type=int, metavar="INT", help=text)
    text = "SLO for the time to first token; goodput counts the requests that meet every SLO"
    parser.add_argument("--slo-ttft-ms", type=float, metavar="MS", help=text)
    text = "SLO for a request's mean time per output token after the first"
    parser.add_argument("--slo-tpot-ms", type=float, metavar="MS", help=text)


def _add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags for a load on a server."""
    text = "measure a server with OpenAI's interface at this address instead of a local engine (extra: bench)"
    parser.add_argument("--url", metavar="URL", help=text)
    text = "key for --url (default: environment variable OPENAI_API_KEY)"
    parser.add_argument("--api-key", metavar="KEY", help=text)
    text = f"upper limit of token ids in prompts for --url (default: {DEFAULT_VOCAB_SIZE})"
    parser.add_argument("--vocab-size", type=int, metavar="INT", help=text)


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the price, files and live statistics."""
    text = "machine price; adds the cost per million tokens"
    parser.add_argument("--price-per-hour", type=float, metavar="PRICE", help=text)
    parser.add_argument(
        "--json", metavar="FILE", help="write all figures, versions, device and configuration to this file"
    )
    text = "write plots to this directory: latencies, batch and pages over time, throughput-latency (extra: bench)"
    parser.add_argument("--plots", metavar="DIR", help=text)
    parser.add_argument("--stats", action="store_true", help="show live statistics on stderr about once a second")

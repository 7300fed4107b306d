"""Command line of `jaxserve bench`. Imports nothing heavy, so a wrong flag fails at once."""

import argparse
from collections.abc import Callable

DEFAULT_VOCAB_SIZE = 1000
AddEngineFlags = Callable[[argparse.ArgumentParser], None]

_OFFLINE = "all requests at once: throughput"
_SERVE = "requests arrive on their own schedule, whether or not earlier ones are done: latency"


def add_bench(bench: argparse.ArgumentParser, add_engine_flags: AddEngineFlags) -> None:
    """Add `offline` and `serve` to the parser of `jaxserve bench`."""
    kinds = bench.add_subparsers(required=True, metavar="KIND", dest="kind")
    usage = "%(prog)s [OPTIONS]"
    text = f"Measure an engine with {_OFFLINE}."
    offline = kinds.add_parser("offline", help=_OFFLINE, description=text, usage=usage)
    _add_workload(offline, "mixed-64")
    text = "number of runs, of which the median is shown"
    offline.add_argument("--rounds", type=int, default=1, metavar="INT", help=text)
    text = f"Measure an engine under load: {_SERVE}."
    serve = kinds.add_parser("serve", help=_SERVE, description=text, usage=usage)
    _add_workload(serve, "poisson-128")
    _add_load(serve)
    _add_server(serve)
    for parser in (offline, serve):
        _add_results(parser)
        add_engine_flags(parser)


def _add_workload(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"name of a built-in workload, or a JSON file of lengths and arrivals (default: {default})"
    parser.add_argument("--workload", default=default, metavar="NAME|FILE", help=text)
    text = "number of requests: the first of the workload, or all and repetitions with new prompts (default: all, once)"
    parser.add_argument("--num-requests", "--num-prompts", type=int, metavar="INT", help=text)


def _add_load(parser: argparse.ArgumentParser) -> None:
    text = "Poisson arrivals per second, a run for each rate; inf is all at once (default: the workload's own arrivals)"
    parser.add_argument("--rate", "--rates", "--request-rate", dest="rates", metavar="R[,R...]", help=text)
    text = "seed of the Poisson arrivals (default: 0)"
    parser.add_argument("--arrival-seed", type=int, metavar="INT", help=text)
    text = "stretch the workload's own arrivals by this factor (default: 1)"
    parser.add_argument("--time-scale", type=float, metavar="FLOAT", help=text)
    text = "most unfinished requests; others arrive when one of these has ended (default: no limit)"
    parser.add_argument("--max-concurrency", type=int, metavar="INT", help=text)
    text = "promised time to first token; goodput counts the requests that meet every promise"
    parser.add_argument("--slo-ttft-ms", type=float, metavar="MS", help=text)
    text = "promised time per output token after the first, on average over a request"
    parser.add_argument("--slo-tpot-ms", type=float, metavar="MS", help=text)


def _add_server(parser: argparse.ArgumentParser) -> None:
    text = "measure the server at this address, any with OpenAI's interface, instead of an engine in this process"
    parser.add_argument("--url", metavar="URL", help=text)
    text = "key for --url (default: OPENAI_API_KEY of the environment)"
    parser.add_argument("--api-key", metavar="KEY", help=text)
    text = f"limit of the token ids in prompts for --url; its model must have them (default: {DEFAULT_VOCAB_SIZE})"
    parser.add_argument("--vocab-size", type=int, metavar="INT", help=text)


def _add_results(parser: argparse.ArgumentParser) -> None:
    text = "price of the machine: adds the cost of tokens"
    parser.add_argument("--price-per-hour", type=float, metavar="PRICE", help=text)
    parser.add_argument("--json", metavar="FILE", help="file for all figures, with versions, device and configuration")
    text = "directory for plots: latencies, batch and pages over time, throughput against latency (extra: bench)"
    parser.add_argument("--plots", metavar="DIR", help=text)
    parser.add_argument("--stats", action="store_true", help="write a live line to stderr about once a second")

"""Flags of `jaxserve simulate` without the engine options. The imports are light, so that a wrong flag fails early."""

import argparse

SIMULATED = {  # engine options that change what is simulated
    "attention_backend",
    "carbon_intensity",
    "dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_partial_prefills",
    "max_num_seqs",
    "num_pages",
    "page_size",
    "quantization",
    "step_ahead",
}


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the trace, the model, the chips and the output."""
    text = (
        "trace of requests: Mooncake's or other JSON lines, Azure's CSV, a report of guidellm, a workload of jaxserve "
        "bench, or an engine's event log; also with gzip"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--trace", metavar="FILE", help=text)
    text = "an engine's event log as the trace, with the engine's sizes where no option gives others"
    where.add_argument("--from-log", metavar="FILE", help=text)
    text = "checkpoint directory, config.json or name of a known model, such as llama-3.1-8b"
    parser.add_argument("--model", metavar="DIR|FILE|NAME", help=f"{text} (default: the embedded model)")
    text = "chips of one replica, as for jaxserve plan, such as h100 or h100x2; or cpu with --step-rates"
    parser.add_argument("--target", metavar="NAME", required=True, help=text)
    parser.add_argument("--replicas", type=int, default=1, metavar="INT", help="number of replicas (default: 1)")
    text = "fraction of the roofline that steps reach, in (0, 1] (default: 1, a lower bound for all times)"
    parser.add_argument("--efficiency", type=float, default=1.0, metavar="FLOAT", help=text)
    text = "measured step times instead of the roofline: a JSON object with an engine's fitted rates"
    parser.add_argument("--step-rates", metavar="FILE", help=text)
    text = "arrival rate relative to the trace's; 2 halves the times between requests (default: 1)"
    parser.add_argument("--speed", type=float, default=1.0, metavar="FLOAT", help=text)
    parser.add_argument("--max-requests", type=int, metavar="INT", help="end after this number of requests")
    text = "what to do with a malformed line: end with an error, or report and skip it (default: stop)"
    parser.add_argument("--on-bad-line", choices=("stop", "skip"), default="stop", help=text)
    text = "refuse requests while this number of requests waits, as the server does (default: never)"
    parser.add_argument("--max-queued-requests", type=int, metavar="INT", help=text)
    text = "refuse requests while waiting requests have this number of uncomputed tokens (default: never)"
    parser.add_argument("--max-queued-tokens", type=int, metavar="INT", help=text)
    text = "prices in dollars per chip and hour: a TOML file with lines such as h100 = 2.9"
    parser.add_argument("--prices", metavar="FILE", help=text)
    text = "chooser of step limits: a class in a Python module; refused if the module imports jax"
    parser.add_argument("--policy", metavar="MODULE:NAME", help=text)
    text = "write a page with the figures over time, by tenant and by class (needs the extra bench)"
    parser.add_argument("--page", metavar="FILE", help=text)
    text = "show an earlier run beside this one on the page: a file that --json printed"
    parser.add_argument("--beside", metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead of text")

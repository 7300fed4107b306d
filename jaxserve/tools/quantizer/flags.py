"""Flags of `jaxserve quantize`. The imports are light, so that a wrong flag fails immediately."""

import argparse

from jaxserve.tools.quantizer.scheme import SCHEMES, QuantizeOptions


def add_quantize(parser: argparse.ArgumentParser) -> None:
    default = QuantizeOptions("int8")
    parser.add_argument("source", metavar="MODEL", help="directory with an unquantised checkpoint")
    parser.add_argument("target", metavar="OUT", help="directory to write, absent or empty")
    text = "; ".join(f"{name}: {scheme.summary}" for name, scheme in SCHEMES.items())
    parser.add_argument("--scheme", required=True, choices=list(SCHEMES), help=text)
    text = "number of weights per scale, for int4 (default: the largest of 128, 64 and 32 that divides all rows)"
    parser.add_argument("--group-size", type=int, metavar="INT", help=text)
    text = "plain text, or JSON lines with `text` or `token_ids` (default: Python's standard library)"
    parser.add_argument("--calibration", metavar="FILE", help=text)
    text = f"maximum number of calibration sequences (default: {default.num_sequences})"
    parser.add_argument("--num-sequences", type=int, default=default.num_sequences, metavar="INT", help=text)
    text = f"tokens per calibration sequence (default: {default.sequence_len})"
    parser.add_argument("--sequence-len", type=int, default=default.sequence_len, metavar="INT", help=text)
    text = f"fraction that SmoothQuant moves from activations to weights (default: {default.smoothing_strength})"
    parser.add_argument(
        "--smoothing-strength", type=float, default=default.smoothing_strength, metavar="FLOAT", help=text
    )


def quantize_options(args: argparse.Namespace) -> QuantizeOptions:
    """Return the given options; ConfigError if they contradict each other."""
    names = ("scheme", "group_size", "calibration", "num_sequences", "sequence_len", "smoothing_strength")
    return QuantizeOptions(**{name: getattr(args, name) for name in names})

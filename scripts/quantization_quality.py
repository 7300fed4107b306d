"""Bits per byte of the embedded model after `jaxserve quantize` with each scheme, against the bytes read per token.

    python scripts/quantization_quality.py                                # scripts/results/quantization.json and .png
    python scripts/quantization_quality.py --limit 20000 --out /tmp/try   # a part of the held-out text

Checkpoints are calibrated on the corpus's training modules and scored on held-out ones, as by `eval_bpb.py`. Their
weights are decoded by numpy here. Activations are rounded as the checkpoint specifies, per token or per group.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from numpy.typing import NDArray
from tokenizers import Tokenizer

from eval_bpb import WEIGHTS, bits_per_byte, score, take
from jaxserve import weights
from jaxserve.layers.linear import FloatMatrix, LinearContext, Matrix
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.models.registry import from_hf_config, param_specs
from jaxserve.tools.quantizer.checkpoint import quantize_checkpoint
from jaxserve.tools.quantizer.scheme import SCHEMES, QuantizeOptions
from jaxserve.weights.safetensors_store import open_tensors
from training import stdlib_corpus
from training.dense_model import load_model

RESULTS = Path(__file__).parent / "results"
MODEL = WEIGHTS / "default"
GROUP_SIZES = (128, 32)
LIMITS = {"int8": 0.2, "fp8": 0.5, "fp8-block": 0.5, "w8a8-smoothquant": 1.0, "int4-gptq": 3.0, "int4-awq": 3.0}


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@struct.dataclass
class RoundingMatrix(Matrix):
    """A matrix whose inputs are rounded first, to codes with one scale per token group."""

    array: Array
    is_float: bool = struct.field(pytree_node=False)
    group_size: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def multiply(self, x: Array, context: LinearContext) -> Array:
        groups = x.reshape(len(x), -1, self.group_size)
        scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / (448 if self.is_float else 127.5)
        scaled = groups / jnp.where(scale == 0, 1, scale)
        if self.is_float:
            codes = jnp.clip(scaled, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype)
        else:
            codes = jnp.clip(jnp.round(scaled), -128, 127)
        return FloatMatrix(self.array).multiply((codes * scale).reshape(x.shape), context)

    def rows(self, ids: Array) -> Array:
        raise NotImplementedError("tables have no inputs to round")


def decode(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return float32 weights from a compressed-tensors checkpoint's tensors."""
    found: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix("_packed")
        if name.endswith(("_scale", "_shape")):
            continue
        if f"{base}_scale" not in tensors:
            found[name] = np.asarray(tensor).astype(np.float32)
            continue
        codes, scale = np.asarray(tensor), np.asarray(tensors[f"{base}_scale"]).astype(np.float32)
        if base != name:
            shape = np.asarray(tensors[f"{base}_shape"])
            bits = 32 * codes.shape[1] // shape[1]
            words = codes.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
            codes = (words & (2**bits - 1)).reshape(shape[0], -1)[:, : shape[1]].astype(np.int32) - 2 ** (bits - 1)
        repeats = [-(-size // num) for size, num in zip(codes.shape, scale.shape, strict=True)]
        found[base] = codes.astype(np.float32) * np.kron(scale, np.ones(repeats, np.float32))
    return found


def load_quantized(directory: Path) -> tuple[Params, ArchConfig]:
    """Return float32 parameters, with layers that round their inputs if the checkpoint specifies it."""
    config = weights.read_config(directory)
    (group,) = config.pop("quantization_config")["config_groups"].values()
    arch = from_hf_config(config)
    params = weights.assemble(decode(open_tensors(directory)), param_specs(arch), jnp.float32)
    if (inputs := group["input_activations"]) is not None:
        for layer in params["layers"]:
            for name in [name for name in layer if name.endswith("_proj")]:
                size = inputs.get("group_size") or layer[name].shape[1]
                layer[name] = RoundingMatrix(layer[name], inputs["type"] == "float", size)
    return params, arch


def write_calibration(file: Path) -> None:
    """Write training modules in random order, as JSON lines."""
    modules = [stdlib_corpus.as_text(module) for module in stdlib_corpus.read(held_out=False)]
    random.Random(0).shuffle(modules)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in modules))


def variants(schemes: Sequence[str]) -> list[QuantizeOptions]:
    """Return the options to compare for these schemes."""
    sizes = {name: GROUP_SIZES if SCHEMES[name].in_groups else (None,) for name in schemes}
    return [QuantizeOptions(name, group_size) for name, groups in sizes.items() for group_size in groups]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the results."""
    lines = [
        "| scheme | MB per token | bits per byte | above bfloat16 | seconds |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        above, seconds = f"{row['above_percent']:+.2f}%", row.get("seconds", "")
        lines.append(f"| {row['name']} | {row['megabytes']:.2f} | {row['bits_per_byte']:.4f} | {above} | {seconds} |")
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for number, row in enumerate(rows):
        style = {"marker": "osD^vP*X<>hd"[number % 12], "color": plt.get_cmap("tab20")(number % 20)}
        axes.plot(row["megabytes"], row["bits_per_byte"], linestyle="", label=row["name"], markersize=8, **style)
    axes.set_xlabel("weights read per token, MB")
    axes.set_ylabel("bits per byte, held-out modules")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES), metavar="NAME")
    parser.add_argument("--limit", type=int, metavar="BYTES", help="bytes to score; all by default")
    parser.add_argument("--window", type=int, default=1024, help="tokens the model sees at once")
    parser.add_argument("--num-sequences", type=int, default=128, help="calibration sequences of 512 tokens")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantization", help="path of the results, no suffix")
    args = parser.parse_args()

    documents = take(stdlib_corpus.read(held_out=True), args.limit)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = [tokenizer.encode(stdlib_corpus.as_text(document)).ids for document in documents]
    params, arch = load_model(MODEL)
    exact = bits_per_byte(score(params, arch, ids, args.window), documents)
    num_bytes = sum(np.asarray(tensor).nbytes for tensor in open_tensors(MODEL).values())
    rows: list[dict[str, Any]] = [
        {"name": "bfloat16", "megabytes": num_bytes / 1e6, "bits_per_byte": exact, "above_percent": 0.0}
    ]
    print(json.dumps(rows[0]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "calibration.jsonl"
        write_calibration(calibration)
        for options in variants(args.schemes):
            name = options.scheme + (f", groups of {options.group_size}" if options.group_size else "")
            started, target = time.monotonic(), Path(folder) / name
            file = str(calibration) if options.kind.is_calibrated else None
            given = QuantizeOptions(options.scheme, options.group_size, file, args.num_sequences)
            done = quantize_checkpoint(MODEL, target, given)
            seconds = time.monotonic() - started
            found = bits_per_byte(score(*load_quantized(target), ids, args.window), documents)
            row = {"name": name, "megabytes": done.num_bytes / 1e6, "bits_per_byte": found}
            row |= {"above_percent": 100 * (found / exact - 1), "seconds": round(seconds)}
            row["mean_error"] = float(np.mean(list(done.errors.values())))
            rows.append(row)
            print(json.dumps(row), flush=True)
    about = {"python": platform.python_version(), "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    about |= {"held_out_bytes": sum(map(len, documents)), "window": args.window, "sequences": args.num_sequences}
    args.out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
    plot(rows, args.out.with_suffix(".png"))
    print(table(rows))
    for row in rows:
        limit = LIMITS.get(str(row["name"]).partition(",")[0])
        if limit is not None and row["above_percent"] > limit:
            print(f"{row['name']} is {row['above_percent']:.2f}% above bfloat16; the target is {limit}%")


if __name__ == "__main__":
    main()

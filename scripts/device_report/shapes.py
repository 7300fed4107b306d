"""Models whose decoding is measured, and the load."""

from dataclasses import dataclass
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}
TINY_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Load:
    """Requests with random tokens, all queued together."""

    shapes: dict[str, dict[str, Any]]
    rows: tuple[int, ...] = (1, 8, 64, 256)
    multi_steps: tuple[int | str, ...] = (1, "auto")
    quantizations: tuple[tuple[str, str], ...] = (("8B", "int8"), ("8B", "int4"), ("8B", "fp8"))
    whole_starts: tuple[str, ...] = ("1B",)  # shapes for which all programs are compiled
    prompt_len: int = 512
    output_len: int = 128
    traced_steps: int = 16
    max_num_batched_tokens: int = 2048
    rounds: int = 3  # measured after one warm-up round

    def models(self) -> dict[str, tuple[dict[str, Any], str | None]]:
        """Return each model's shape and quantisation, by name."""
        plain: dict[str, tuple[dict[str, Any], str | None]] = {
            name: (shape, None) for name, shape in self.shapes.items()
        }
        return plain | {f"{name}-{form}": (self.shapes[name], form) for name, form in self.quantizations}


FULL_LOAD = Load(SHAPES)
FULL_TPU_LOAD = Load(SHAPES, rows=(1, 8, 64))  # more keys and values do not fit a v6e alongside 8B
TINY_LOAD = Load({"tiny": TINY_SHAPE}, (1, 2), (1, 4), (("tiny", "int4"),), (), 12, 48, 4, 2, 1)


def choose_load(device: str, dry_run: bool) -> Load:
    """Return a device's load, or a small one that only shows that it works."""
    return TINY_LOAD if dry_run else {"gpu": FULL_LOAD, "tpu": FULL_TPU_LOAD}[device]

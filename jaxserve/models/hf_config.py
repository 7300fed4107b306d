"""Parser for config.json: fields are checked as they are read, and mean the same as in transformers.

A family merges its defaults into the config before it reads fields.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jaxserve.api import schema
from jaxserve.api.schema import FieldType
from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig

HfConfig = Mapping[str, Any]  # content of config.json
DTYPES = ("float32", "float16", "bfloat16")


def one_of(names: Collection[str]) -> FieldType:
    """Return the type whose values are these strings."""
    return schema.one_of(sorted(names))


SIZE = schema.integer(1)
COUNT = schema.integer(0)
NUMBER = schema.number()
POSITIVE = schema.number(0, excludes_low=True)
SWITCH = dataclasses.replace(schema.SWITCH, words="true or false")  # JSON's spelling
STRINGS = FieldType(
    "a list of strings", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value)
)
FRACTION = schema.number(0, 1, excludes_low=True)
NUMBERS = FieldType(
    "a list of positive numbers", lambda value: isinstance(value, list) and all(POSITIVE.holds(v) for v in value)
)
TABLE = schema.OBJECT


_read: ContextVar[set[str] | None] = ContextVar("read", default=None)


@contextmanager
def noting_fields() -> Iterator[set[str]]:
    """Yield a set to which the name of each field is added that is read inside the context."""
    names: set[str] = set()
    token = _read.set(names)
    try:
        yield names
    finally:
        _read.reset(token)


def read_fields(config: HfConfig, kinds: Mapping[str, FieldType]) -> dict[str, Any]:
    """Return the values of the fields in `kinds`, None if absent; ConfigError lists all fields with a wrong type."""
    if (noted := _read.get()) is not None:
        noted.update(kinds)
    values = {name: config.get(name) for name in kinds}
    if bad := [problem for name, kind in kinds.items() if (problem := kind.problem(name, values[name])) is not None]:
        raise ConfigError(f"config.json: {'; '.join(bad)}")
    return values


def read_field(config: HfConfig, name: str, kind: FieldType) -> Any:
    """Return one field's value, None if absent; ConfigError if its type is wrong."""
    return read_fields(config, {name: kind})[name]


def read_num_layers(config: HfConfig) -> int:
    """Return `num_hidden_layers`; ConfigError if it is absent or malformed."""
    return int(read_field(config, "num_hidden_layers", SIZE))


def read_dtype(config: HfConfig) -> str:
    """Return the checkpoint's dtype, float32 if not given."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    return str(read_field({"dtype": name}, "dtype", one_of(DTYPES)))


ORIGINAL_LENGTH = "original_max_position_embeddings"
_ROPE_OPTIONS: dict[str, dict[str, FieldType]] = {
    "default": {},
    "linear": {"factor": POSITIVE, ORIGINAL_LENGTH: SIZE},
    "llama3": {"factor": POSITIVE, "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE, ORIGINAL_LENGTH: SIZE},
    "longrope": {
        "short_factor": NUMBERS,
        "long_factor": NUMBERS,
        "factor": POSITIVE,
        ORIGINAL_LENGTH: SIZE,
        "attention_factor": NUMBER.or_null(),
    },
    "proportional": {"factor": POSITIVE.or_null(), "partial_rotary_factor": FRACTION.or_null()},
    "yarn": {
        "factor": POSITIVE,
        ORIGINAL_LENGTH: SIZE,
        **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"), NUMBER.or_null()),
        "truncate": SWITCH.or_null(),
    },
}
_ROPE_FIELDS = {
    "rope_type": one_of(_ROPE_OPTIONS),
    "rope_theta": POSITIVE,
    "partial_rotary_factor": FieldType("1 or null", lambda value: value is None or value == 1),
}


def _same_for_all(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one table with RoPE parameters.

    Args:
        raw: RoPE parameters, or in newer files one table per layer type.

    Raises:
        ConfigError: layer types have different parameters.
    """
    by_kind = {name: value for name, value in raw.items() if name.endswith("_attention")}
    if not by_kind:
        return raw
    first, *others = read_fields(by_kind, dict.fromkeys(by_kind, TABLE)).values()
    if any(other != first for other in others):
        raise ConfigError(
            f"config.json: the parameters of rotations must be the same for all kinds of layers, got {by_kind}"
        )
    return dict(first)


def read_rope(config: HfConfig, default_fraction: float | None = None) -> RopeConfig:
    """Read RoPE settings from the new field (`rope_parameters`) or the old ones (`rope_scaling`, `rope_theta`, `type`).

    Args:
        config: content of config.json.
        default_fraction: rotated fraction of each head if `partial_rotary_factor` is absent; None if heads are always
            rotated whole.

    Raises:
        ConfigError: the scaling is not supported, or one of its parameters is missing or malformed.
    """
    kinds = {"rope_scaling": TABLE.or_null(), "rope_parameters": TABLE.or_null()}
    spelled = read_fields(config, kinds)
    raw = spelled["rope_scaling"] or spelled["rope_parameters"] or {}
    raw = _same_for_all(raw)
    shared = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    kind = raw.get("rope_type") or raw.get("type") or "default"
    is_whole = kind == "proportional"  # its fraction counts pairs, and the others rotate by 0
    kinds = _ROPE_FIELDS if default_fraction is None else {**_ROPE_FIELDS, "partial_rotary_factor": FRACTION}
    if is_whole:
        kinds = {**_ROPE_FIELDS, "partial_rotary_factor": FRACTION.or_null()}
    defaults = {"rope_theta": 10000.0, "partial_rotary_factor": default_fraction}
    fields = read_fields({**defaults, **shared, **raw, "rope_type": kind}, kinds)
    trained = {ORIGINAL_LENGTH: config.get("max_position_embeddings"), **raw}
    if ORIGINAL_LENGTH in config:
        trained[ORIGINAL_LENGTH] = config[
            ORIGINAL_LENGTH
        ]  # takes precedence over the RoPE parameters, as in transformers
    if kind == "longrope" and trained.get("factor") is None:
        sizes = read_fields({**config, **trained}, {"max_position_embeddings": SIZE, ORIGINAL_LENGTH: SIZE})
        trained["factor"] = sizes["max_position_embeddings"] / sizes[ORIGINAL_LENGTH]
    options = {name: v for name, v in read_fields(trained, _ROPE_OPTIONS[kind]).items() if v is not None}
    if kind == "llama3" and options["low_freq_factor"] >= options["high_freq_factor"]:
        raise ConfigError(f"config.json: low_freq_factor must be below high_freq_factor, got {options}")
    numbers = {k: tuple(map(float, v)) if isinstance(v, list) else float(v) for k, v in options.items()}
    fraction = 1.0 if is_whole else float(fields["partial_rotary_factor"] or 1.0)
    return RopeConfig(float(fields["rope_theta"]), kind, tuple(sorted(numbers.items())), fraction)


def max_position(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Return the maximum number of positions, derived as in vLLM.

    Linear and YaRN scaling extend the pre-trained length by `factor`. That length is
    `original_max_position_embeddings` if the checkpoint has it, because then `max_position_embeddings` may already be
    the extended length; else `max_position_embeddings`. Llama 3 scaling leaves `max_position_embeddings` unchanged:
    its checkpoints give the extended length.
    """
    if rope.kind not in ("linear", "yarn"):
        return max_position_embeddings
    options = dict(rope.options)
    return int(options[ORIGINAL_LENGTH] * options["factor"])


def token_id_set(value: Any) -> frozenset[int]:
    """Parse `eos_token_id`: null, an id or a list; ConfigError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id must be a token id, a list of them or null, got {value!r}")
    return frozenset(ids)

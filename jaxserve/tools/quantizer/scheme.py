"""Quantisation schemes and the options of a run. The imports are light, for the command line."""

from dataclasses import dataclass

from jaxserve.api.schema import Schema, integer, number, one_of
from jaxserve.errors import ConfigError

GROUP_SIZES = (128, 64, 32)  # sizes that other engines' kernels have, the usual one first
BLOCK_SIZE = 128  # rows and columns per block, and activations per group, in fp8-block


@dataclass(frozen=True)
class Scheme:
    """Quantisation scheme.

    Attributes:
        summary: description for the command line.
        layout: file layout's name in compressed-tensors.
        bits: bits per weight.
        activations: strategy by which activations are quantised in serving: "token" or "group"; None if they are not.
        smoothing: method that moves factors between inputs and weights before rounding: "awq", "smoothquant".
        rounding: "nearest"; "search" for scales with the least output error; "gptq" for such scales, and later columns
            that compensate errors.
        in_groups: True for scales per group in a row, rather than per row or block.
        in_blocks: True for scales per block.
    """

    summary: str
    layout: str
    bits: int
    activations: str | None = None
    smoothing: str | None = None
    rounding: str = "nearest"
    in_groups: bool = False
    in_blocks: bool = False

    @property
    def is_float(self) -> bool:
        """True for float8 weights, False for integers."""
        return self.layout == "float-quantized"

    @property
    def is_calibrated(self) -> bool:
        """True if the result depends on a calibration text."""
        return self.smoothing is not None or self.rounding != "nearest"


_PACKED = "pack-quantized"
SCHEMES = {
    "int4-gptq": Scheme("4-bit groups by GPTQ", _PACKED, 4, rounding="gptq", in_groups=True),
    "int4-awq": Scheme("4-bit groups by AWQ", _PACKED, 4, smoothing="awq", rounding="search", in_groups=True),
    "int4-rtn": Scheme("4-bit groups, to the nearest", _PACKED, 4, in_groups=True),
    "int8": Scheme("8-bit rows, to the nearest", _PACKED, 8),
    "w8a8-smoothquant": Scheme(
        "8-bit rows and activations, by SmoothQuant", "int-quantized", 8, "token", smoothing="smoothquant"
    ),
    "fp8": Scheme("float8 rows and activations", "float-quantized", 8, "token"),
    "fp8-block": Scheme("float8 blocks and activations", "float-quantized", 8, "group", in_blocks=True),
}


@dataclass(frozen=True)
class QuantizeOptions:
    """Options for a run.

    Attributes:
        scheme: name of the scheme.
        group_size: number of weights per scale, for schemes with groups; by default the largest of 128, 64 and
            32 that divides all matrices' rows.
        calibration: file with plain text, or JSON lines with `text` or `token_ids`; by default Python's standard
            library.
        num_sequences: maximum number of calibration sequences.
        sequence_len: tokens per calibration sequence, at most the model's context length.
        smoothing_strength: fraction of the difficulty that SmoothQuant moves from activations to weights.
        max_shard_bytes: size above which weights are split into several files.
    """

    scheme: str
    group_size: int | None = None
    calibration: str | None = None
    num_sequences: int = 128
    sequence_len: int = 512
    smoothing_strength: float = 0.5
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        _OPTIONS.check(self)
        if self.group_size is not None and not self.kind.in_groups:
            raise ConfigError(f"group_size is for schemes with groups, and {self.scheme} has none; leave it out")

    @property
    def kind(self) -> Scheme:
        """The scheme that `scheme` names."""
        return SCHEMES[self.scheme]


_OPTIONS = Schema(
    ConfigError,
    QuantizeOptions,
    {
        "scheme": one_of(SCHEMES),
        "group_size": integer(1).optional(),
        "num_sequences": integer(1),
        "sequence_len": integer(1),
        "smoothing_strength": number(0, 1),
    },
)

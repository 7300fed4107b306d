"""Scheme: one way to quantise a checkpoint, and the options of a run. Imports nothing heavy, for the command line."""

from dataclasses import dataclass

from jaxserve.errors import ConfigError

GROUP_SIZES = (128, 64, 32)  # sizes that kernels of other engines have, the usual one first
BLOCK_SIZE = 128  # rows and columns of a block, and of a group of activations, in fp8-block


@dataclass(frozen=True)
class Scheme:
    """Names and parts of a scheme.

    Attributes:
        summary: description for the command line.
        layout: layout of the file, by its name in compressed-tensors.
        bits: bits of a weight.
        activations: strategy by which activations are quantised in serving: "token" or "group"; None if they are not.
        smoothing: method by which factors are moved between inputs and weights before rounding: "awq", "smoothquant".
        rounding: "nearest"; "search" for scales chosen by the error of the outputs; "gptq" for that and for errors
            that later columns make up for.
        in_groups: True for scales per group of a row, rather than per row or block.
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
        """True for weights in float8."""
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
    """Options of a run.

    Attributes:
        scheme: name of the scheme.
        group_size: weights of a row that share a scale, for schemes with groups; None is the largest of 128, 64 and 32
            that divides the rows of all matrices.
        calibration: file of text, or of JSON lines with `text` or `token_ids`; None is the source of Python's standard
            library.
        num_sequences: most calibration sequences.
        sequence_len: tokens of a calibration sequence; the model's context bounds it.
        smoothing_strength: share of the difficulty that SmoothQuant moves from activations to weights.
        max_shard_bytes: size above which weights go to several files.
    """

    scheme: str
    group_size: int | None = None
    calibration: str | None = None
    num_sequences: int = 128
    sequence_len: int = 512
    smoothing_strength: float = 0.5
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme must be one of {', '.join(SCHEMES)}, got {self.scheme!r}")
        if self.group_size is not None and not self.kind.in_groups:
            raise ConfigError(f"group_size is for schemes with groups, and {self.scheme} has none; leave it out")
        for name in ("group_size", "num_sequences", "sequence_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive, got {value}")
        if not 0 <= self.smoothing_strength <= 1:
            raise ConfigError(f"smoothing_strength must be between 0 and 1, got {self.smoothing_strength}")

    @property
    def kind(self) -> Scheme:
        """The scheme."""
        return SCHEMES[self.scheme]

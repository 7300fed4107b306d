"""CheckpointError, and how a checkpoint differs from its model."""

from collections.abc import Sequence
from dataclasses import dataclass, field


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be read or does not match the model."""


@dataclass
class Mismatch:
    """Differences between the tensors that a model needs and the tensors in a checkpoint."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)

    def raise_if_any(self, where: object, advice: str) -> None:
        """Raise a CheckpointError with the first 32 differences of each type, if there are any."""
        differences = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.misshapen,
            "of an unsupported dtype": self.mistyped,
        }
        lines = [f"  {len(names)} {label}: {listed(names, 32)}" for label, names in differences.items() if names]
        if lines:
            raise CheckpointError("\n".join([f"{where} must hold the tensors of the model, got", *lines, advice]))


def listed(names: Sequence[str], max_listed: int = 8) -> str:
    """Return the first `max_listed` names, and the number of the others."""
    more = len(names) - max_listed
    return ", ".join(names[:max_listed]) + (f", and {more} more" if more > 0 else "")

"""Base class for Pallas matmul kernels, with their block sizes and other static parameters."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.pallas_kernel import PallasKernel, Settings
from jaxserve.pallas_kernels.target import TargetChip

P = TypeVar("P", bound=Problem)

SETTINGS = Settings(Path(__file__).parent / "tuned")


@dataclass(frozen=True)
class Tiles:
    """Block sizes.

    Attributes:
        rows: x rows per tile.
        outputs: matrix rows per tile.
        columns: stored matrix columns per block.
        warpgroups: computing warpgroups per thread block; GPUs only.
        stages: blocks in the shared-memory ring; GPUs only.
        splits: number of column splits, each with separate work items (split-K).
    """

    rows: int
    outputs: int
    columns: int
    warpgroups: int = 0
    stages: int = 0
    splits: int = 1


@dataclass(frozen=True)
class Launch(Generic[P]):
    """Static parameters for one kernel launch.

    Attributes:
        problem: shapes and dtypes.
        tiles: block sizes.
        chip: target chip.
        interpret: parameters for Pallas' interpreter; None to run on the chip.
    """

    problem: P
    tiles: Tiles
    chip: TargetChip
    interpret: Any

    @property
    def num_row_tiles(self) -> int:
        return -(-self.problem.num_rows // self.tiles.rows)

    @property
    def num_output_tiles(self) -> int:
        """Number of matrix row tiles."""
        return -(-self.problem.num_outputs // self.tiles.outputs)

    @property
    def num_blocks(self) -> int:
        """Number of column blocks per work item."""
        return self.problem.stored_columns // self.tiles.columns // self.tiles.splits

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that select the interpreter."""
        return {} if self.interpret is None else {"interpret": self.interpret}


class MatmulKernel(PallasKernel[P, Launch[P]]):
    """Pallas matmul kernel.

    Attributes:
        limits: dataclass with the block size limits, which may be tuned.
    """

    limits: ClassVar[type[Any]]

    def __init__(self) -> None:
        super().__init__(SETTINGS)

    def launch(self, problem: P) -> Launch[P]:
        """Choose block sizes for the target chip."""
        chip = self.target_chip()
        limits = self.settings.sizes(self.limits, chip.name, problem.shape_class)
        return Launch(problem, self.choose_tiles(problem, limits, chip), chip, self.settings.interpreter)

    @abstractmethod
    def choose_tiles(self, problem: P, limits: Any, chip: TargetChip) -> Tiles:
        """Return block sizes within `limits` that fit the chip; ValueError if there are none."""


def round_up(x: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-x // multiple) * multiple

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
    """Block sizes for a matmul kernel: an output tile is `[rows, outputs]`, computed one column block at a time.

    Attributes:
        rows: x rows per output tile.
        outputs: matrix rows per output tile.
        columns: columns of x and of the matrix per block; if a stored byte has two elements, bytes per matrix row.
        warpgroups: computing warpgroups per thread block; GPUs only.
        stages: column blocks in the shared-memory ring; GPUs only.
        splits: number of column ranges that are summed in separate work items (split-K).
    """

    rows: int
    outputs: int
    columns: int
    warpgroups: int = 0
    stages: int = 0
    splits: int = 1


@dataclass(frozen=True)
class Launch(Generic[P]):
    """Static parameters for one matmul kernel launch.

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
        """Number of tiles that cover the x rows."""
        return -(-self.problem.num_rows // self.tiles.rows)

    @property
    def num_output_tiles(self) -> int:
        """Number of tiles that cover one matrix's rows."""
        return -(-self.problem.num_outputs // self.tiles.outputs)

    @property
    def num_blocks(self) -> int:
        """Number of column blocks that are summed up for one output tile, or for one of its splits."""
        return self.problem.stored_columns // self.tiles.columns // self.tiles.splits


class MatmulKernel(PallasKernel[P, Launch[P]]):
    """Backend with a Pallas matmul kernel for problems of type P.

    Attributes:
        limits: dataclass with the kernel's block size limits, whose fields tuned or requested sizes replace.
    """

    limits: ClassVar[type[Any]]

    def __init__(self) -> None:
        """Use the settings that all Pallas matmul kernels share."""
        super().__init__(SETTINGS)

    def launch(self, problem: P) -> Launch[P]:
        """Return a problem's static launch parameters, with block sizes chosen for the target chip.

        Raises:
            ValueError: no block sizes fit the chip, or the limits are invalid.
        """
        chip = self.target_chip()
        limits = self.settings.sizes(self.limits, chip.name, problem.shape_class)
        return Launch(problem, self.choose_tiles(problem, limits, chip), chip, self.settings.interpreter)

    @abstractmethod
    def choose_tiles(self, problem: P, limits: Any, chip: TargetChip) -> Tiles:
        """Return the block sizes for a problem, within the kernel's `limits` and the chip's memory.

        Raises:
            ValueError: no block sizes fit.
        """

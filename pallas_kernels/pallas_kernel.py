"""Base class for backends with a Pallas kernel: when one can run, and with which block sizes."""

from __future__ import annotations

import functools
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import jax

from jaxserve.pallas_kernels import hopper, tpu
from jaxserve.pallas_kernels.op import scoped
from jaxserve.pallas_kernels.target import TargetChip, target_platform

S = TypeVar("S")


@runtime_checkable
class KernelProblem(Protocol):
    """Static parameters for a Pallas kernel call; every op has a dataclass with more of them."""

    @property
    def platform(self) -> str:
        """Platform to compile for: "cpu", "gpu" or "tpu"."""


P = TypeVar("P", bound=KernelProblem)
L = TypeVar("L")


class PallasKernel(ABC, Generic[P, L]):
    """Backend with a Pallas kernel for GPUs or TPUs.

    P is the type of the problems that it runs, L the type of a launch's static parameters.

    Attributes:
        platform: "gpu" or "tpu".
        module: name of the module with the kernel. It is imported on first use, since importing Pallas takes a third of
            a second.
        settings: block sizes and interpreter parameters, which all kernels of an op share.
    """

    platform: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, settings: Settings) -> None:
        """Use these settings, which all kernels of an op share."""
        self.settings = settings

    @property
    def chips(self) -> Any:
        """Module with the properties of the chips that the kernel runs on: Hopper GPUs or TPUs."""
        return hopper if self.platform == "gpu" else tpu

    def unsupported_reason(self, problem: P) -> str | None:
        """Return the reason why this kernel cannot run a problem on the target chip, or None if it can.

        If jax compiles for another platform than the kernel's, the chip's limits are not checked.
        """
        is_interpreted = self.settings.interpreter is not None
        if problem.platform != self.platform and not is_interpreted:
            return f"it runs on {self.platform.upper()}s only"
        reason = self.unsupported_problem(problem) or self._import_failure()
        if reason is not None or not (is_interpreted or target_platform() == self.platform):
            return reason
        if self.platform == "gpu" and not is_interpreted and (reason := self.chips.unsupported_reason()) is not None:
            return reason
        try:
            self.launch(problem)
        except ValueError as error:  # also raised for a TPU that jax does not know
            return str(error)
        return None

    @abstractmethod
    def unsupported_problem(self, problem: P) -> str | None:
        """Return the reason why the kernel cannot run a problem on any chip of its platform, or None if it can."""

    @abstractmethod
    def launch(self, problem: P) -> L:
        """Return the static parameters of the kernel call for a problem, with block sizes that fit the target chip.

        Raises:
            ValueError: no block sizes fit, requested or tuned ones are invalid, or jax does not know the chip.
        """

    def target_chip(self) -> TargetChip:
        """Return the chip to compile for; in the interpreter, a small imaginary chip."""
        chip: TargetChip = self.chips.target_chip() if self.settings.interpreter is None else self.chips.INTERPRETED
        return chip

    def kernel(self) -> Any:
        """Import and return the module with the kernel."""
        return importlib.import_module(self.module)

    def _import_failure(self) -> str | None:
        """Return the reason why the kernel's module cannot be imported, or None if it can.

        Names in Pallas differ between jax versions.
        """
        try:
            self.kernel()
        except (ImportError, AttributeError) as error:
            return f"Pallas for {self.platform.upper()}s does not load in jax {jax.__version__}: {error}"
        return None


class Settings:
    """Block sizes and interpreter parameters for all Pallas kernels of an op.

    Context managers change them for calls that are traced inside. Block sizes requested with `sized` replace the sizes
    that were tuned for the chip and the class of shapes; these replace the defaults. A JSON file per chip,
    `folder/CHIP.json`, holds the tuned sizes with their evidence:

        {"entries": [{"shape": {"head_dim": 128, ...}, "sizes": {"tile_keys": 1024, ...}, "evidence": {...}}, ...]}
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Read tuned block sizes from a folder with one file per chip; None if nothing was tuned."""
        self.folder = folder
        self._sizes: ContextVar[dict[str, int] | None] = ContextVar("sizes", default=None)
        self._interpreter: ContextVar[Any] = ContextVar("interpreter", default=None)

    def interpreted(self, params: Any) -> AbstractContextManager[None]:
        """Run kernels that are called inside the context in Pallas' interpreter, on any machine.

        Args:
            params: value for the `interpret` argument of Pallas, such as `pltpu.InterpretParams()`.
        """
        return scoped(self._interpreter, params)

    @property
    def interpreter(self) -> Any:
        """Parameters for the interpreter; None to run on a chip."""
        return self._interpreter.get()

    def sized(self, **sizes: int) -> AbstractContextManager[None]:
        """Use these block sizes, by name, for calls that are traced inside; others keep their defaults."""
        return scoped(self._sizes, sizes)

    def sizes(self, kind: type[S], chip: str, shape: Mapping[str, int | str], **defaults: int) -> S:
        """Return the block sizes for a chip and a class of shapes, as an instance of `kind`.

        Args:
            kind: dataclass whose fields are block sizes, with default values.
            chip: name of the chip, such as "h200".
            shape: sizes and dtypes that identify the class of shapes in the chip's file.
            **defaults: the chip's default sizes, which replace the dataclass's default values.

        Raises:
            ValueError: sizes are invalid or have unknown names, or the chip's file is malformed.
        """
        given, source = self._sizes.get(), "`sized`"
        if given is None:
            given, source = self._tuned(chip, shape), f"{self.folder} for {chip}"
        if unknown := sorted(given.keys() - {field.name for field in fields(kind)}):  # type: ignore[arg-type]
            raise ValueError(f"there are no block sizes called {unknown}, which come from {source}")
        return kind(**(defaults | given))

    def _tuned(self, chip: str, shape: Mapping[str, int | str]) -> dict[str, int]:
        """Return the tuned block sizes by name from the chip's file; none if it has no entry for the shape class."""
        entries = () if self.folder is None else read_entries(self.folder / f"{chip}.json")
        return next((entry.sizes for entry in entries if entry.shape == shape), {})


@dataclass(frozen=True)
class TunedSizes:
    """Block sizes that were fastest in measurements for a class of shapes: one entry in a chip's file.

    Attributes:
        shape: sizes and dtypes that all problems in the class have in common.
        sizes: block sizes by name, which replace the defaults.
        evidence: measurements with these and the previous sizes; names end with the unit.
    """

    shape: dict[str, int | str]
    sizes: dict[str, int]
    evidence: dict[str, Any]


@functools.cache
def read_entries(path: Path) -> Sequence[TunedSizes]:
    """Return the entries in a chip's file with tuned block sizes, no entries if there is no file.

    Raises:
        ValueError: the file is malformed.
    """
    if not path.exists():
        return ()
    try:
        return [TunedSizes(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold entries of shape, sizes and evidence, but: {error}") from error

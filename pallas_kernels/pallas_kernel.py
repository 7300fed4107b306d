"""Base class for backends with a Pallas kernel: when one can run, and with which block sizes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import jax

from jaxserve.pallas_kernels import hopper, tpu
from jaxserve.pallas_kernels.target import TargetChip, target_platform

S = TypeVar("S")


@runtime_checkable
class KernelProblem(Protocol):
    """Static parameters for a Pallas kernel call."""

    @property
    def platform(self) -> str:
        """Platform to compile for: "cpu", "gpu" or "tpu"."""


P = TypeVar("P", bound=KernelProblem)
L = TypeVar("L")


class PallasKernel(ABC, Generic[P, L]):
    """Backend with a Pallas kernel for Hopper GPUs or TPUs.

    Attributes:
        platform: "gpu" or "tpu".
        module: kernel module, imported on first use as importing Pallas takes a third of a second.
        settings: settings that an op's kernels share.
    """

    platform: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def unsupported_reason(self, problem: P) -> str | None:
        """Return the reason why this kernel cannot run a problem, or None if it can."""
        is_interpreted = self.settings.interpreter is not None
        if problem.platform != self.platform and not is_interpreted:
            return f"it runs on {self.platform.upper()}s only"
        reason = self.unsupported_problem(problem) or self._import_failure()
        if reason is not None or not (is_interpreted or target_platform() == self.platform):
            return reason
        if self.platform == "gpu" and not is_interpreted and (reason := hopper.unsupported_reason()) is not None:
            return reason
        try:
            self.launch(problem)
        except ValueError as error:  # also raised for a TPU that jax does not know
            return str(error)
        return None

    @abstractmethod
    def unsupported_problem(self, problem: P) -> str | None:
        """Return the reason why the kernel cannot run a problem on any chip, or None if it can."""

    @abstractmethod
    def launch(self, problem: P) -> L:
        """Return the kernel call's static parameters, with block sizes that fit the target chip.

        Raises:
            ValueError: no block sizes fit, requested or tuned ones are invalid, or jax does not know the chip.
        """

    def target_chip(self) -> TargetChip:
        """Return the target chip, or the stand-in that the interpreter simulates."""
        family: Any = hopper if self.platform == "gpu" else tpu
        chip: TargetChip = family.target_chip() if self.settings.interpreter is None else family.INTERPRETED
        return chip

    def kernel(self) -> Any:
        return importlib.import_module(self.module)

    def _import_failure(self) -> str | None:
        """Return the reason why the kernel cannot be imported, or None: names in Pallas differ between jax versions."""
        try:
            self.kernel()
        except (ImportError, AttributeError) as error:
            return f"Pallas for {self.platform.upper()}s does not load in jax {jax.__version__}: {error}"
        return None


class Settings:
    """Settings for an op's Pallas kernels, scoped by context managers at trace time.

    Requested block sizes come first, then sizes tuned for the chip and the class of shapes, then defaults. A JSON file
    per chip holds the tuned sizes with their evidence:

        {"entries": [{"shape": {"head_dim": 128, ...}, "sizes": {"tile_keys": 1024, ...}, "evidence": {...}}, ...]}

    Args:
        folder: folder with the tuned sizes; None if nothing was tuned.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._sizes: ContextVar[dict[str, int] | None] = ContextVar("sizes", default=None)
        self._interpreter: ContextVar[Any] = ContextVar("interpreter", default=None)

    @contextlib.contextmanager
    def interpreted(self, params: Any) -> Iterator[None]:
        """Run calls traced inside in Pallas' interpreter, on any machine, with these parameters."""
        token = self._interpreter.set(params)
        try:
            yield
        finally:
            self._interpreter.reset(token)

    @property
    def interpreter(self) -> Any:
        """Parameters for the interpreter; None to run on a chip."""
        return self._interpreter.get()

    @contextlib.contextmanager
    def sized(self, **sizes: int) -> Iterator[None]:
        """Use these block sizes for calls traced inside; sizes that are not named keep their defaults."""
        token = self._sizes.set(sizes)
        try:
            yield
        finally:
            self._sizes.reset(token)

    def sizes(self, kind: type[S], chip: str, shape: Mapping[str, int | str], **defaults: int) -> S:
        """Return block sizes.

        Args:
            kind: dataclass for the block sizes.
            chip: chip name.
            shape: properties that all problems with the same tuned sizes have in common.
            defaults: defaults for the chip that replace the dataclass's own.

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
        entries = () if self.folder is None else read_entries(self.folder / f"{chip}.json")
        return next((entry.sizes for entry in entries if entry.shape == shape), {})


@dataclass(frozen=True)
class TunedSizes:
    """Block sizes that measured best for a class of shapes.

    Attributes:
        shape: properties that all problems in the class have in common.
        sizes: sizes that replace the defaults.
        evidence: measurements with these and the previous sizes, with units in their names.
    """

    shape: dict[str, int | str]
    sizes: dict[str, int]
    evidence: dict[str, Any]


@functools.cache
def read_entries(path: Path) -> Sequence[TunedSizes]:
    """Return the entries in a chip's file; none if there is no file.

    Raises:
        ValueError: the file is malformed.
    """
    if not path.exists():
        return ()
    try:
        return [TunedSizes(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold entries of shape, sizes and evidence, but: {error}") from error

"""Checks that an adapter's modules and matrices are in the model, and that their sizes fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from jaxserve.api.lora_request import LORA_BIAS, MODULES_TO_SAVE, TRAINABLE_TOKENS, USE_DORA
from jaxserve.errors import ConfigError
from jaxserve.models.adapted_specs import EMBED, HEAD, AdaptedSpec, embeddings, separate_experts, unknown_module
from jaxserve.models.arch import ArchConfig
from jaxserve.weights.adapter_files import AdapterFile, AdapterModule, TrainedTokens, module_names

MAX_TRAINED_TOKENS = 256  # per adapter and matrix; in bfloat16 these rows take 2 MiB if they have 4,096 elements


@dataclass(frozen=True)
class AdapterCheck:
    """Finder of the model's modules in adapters.

    Attributes:
        arch: the whole model's sizes.
        specs: the whole matrices that adapters may change.
        max_rank: maximum rank.
        extras: features of adapters that have memory; see `LORA_EXTRAS`.
    """

    arch: ArchConfig
    specs: Sequence[AdaptedSpec]
    max_rank: int
    extras: tuple[str, ...]

    def modules(self, adapter: AdapterFile) -> dict[str, AdapterModule]:
        """Return an adapter's factors by the model's module names.

        Raises:
            ConfigError: a module is not in the model or cannot be adapted, or its sizes or rank do not fit.
        """
        known = {part.module: (each, part) for each in self.specs for part in each.parts}
        found: dict[str, AdapterModule] = {}
        for name, module in separate_experts(adapter.modules, self.arch):
            own = next((each for each in module_names(name) if each in known), None)
            if own is None:
                raise ConfigError(unknown_module(name, list(known), self.arch))
            if own in found:
                raise ConfigError(f"an adapter must have one pair of factors for {own}, got another one named {name}")
            each, part = known[own]
            wanted = each.num_rows(part), each.spec.shape[1]
            got = module.b.shape[-2], module.a.shape[-1]
            if each.is_table != module.is_table:
                kind = "lora_embedding_A and lora_embedding_B" if each.is_table else "lora_A and lora_B"
                raise ConfigError(f"an adapter must have {kind} for {own}, got other factors; save it with PEFT")
            if wanted != got:
                raise ConfigError(
                    f"the adapter must fit {own} with {wanted[1]} inputs and {wanted[0]} outputs, got factors for "
                    f"{got[1]} and {got[0]}; it was trained on another model"
                )
            if module.rank > self.max_rank:
                raise ConfigError(
                    f"the rank of an adapter must be at most max_lora_rank, {self.max_rank}, got {module.rank} in "
                    f"{name}; raise max_lora_rank"
                )
            if each.spec.experts is not None and not (module.bias is None and module.magnitude is None):
                raise ConfigError(f"adapters of routed experts must have factors only, got vectors for {name}")
            if each.expands_latents and (adapter.invocation or not (module.bias is None and module.magnitude is None)):
                raise ConfigError(
                    f"adapters of {name} must have factors only and apply to whole prompts, got vectors, or invocation "
                    "tokens: a query expands its row's latents with one adapter"
                )
            if module.bias is not None:
                self._require(LORA_BIAS, f"biases, as of {name},")
            if module.magnitude is not None:
                self._require(USE_DORA, f"magnitudes (DoRA), as of {name},")
            found[own] = module
        return found

    def matrices(self, adapter: AdapterFile) -> dict[tuple[str | int, ...], NDArray[Any]]:
        """Return the matrices that replace the model's, by path.

        Raises:
            ConfigError: a matrix is none of embedding and head, or its shape is another.
        """
        specs = {spec.hf_names[0].removesuffix(".weight"): spec for spec in embeddings(self.arch)}
        found: dict[tuple[str | int, ...], NDArray[Any]] = {}
        shapes = {name: matrix.shape for name, matrix in adapter.whole.items()}
        for name, shape in (shapes | adapter.base).items():
            own = next((specs[each] for each in module_names(name) if each in specs), None)
            if own is None:
                raise ConfigError(
                    f"whole matrices of adapters must be in {list(specs)}, got {name}; train the adapter without it in "
                    "modules_to_save"
                )
            if shape != own.shape:
                raise ConfigError(
                    f"{name} of the adapter must have the model's shape, {list(own.shape)}, got {list(shape)}; it was "
                    "trained on a model with another vocabulary or size"
                )
            if name in adapter.whole:
                self._require(MODULES_TO_SAVE, f"whole matrices, as {name},")
                found[own.path] = adapter.whole[name]
        return found

    def tokens(self, adapter: AdapterFile) -> dict[tuple[str | int, ...], TrainedTokens]:
        """Return the rows that replace the model's, by the matrix's path.

        Raises:
            ConfigError: a matrix is none of embedding and head, or ids or sizes do not fit.
        """
        tables = embeddings(self.arch)
        specs = {spec.hf_names[0].removesuffix(".weight"): spec for spec in tables}
        found: dict[tuple[str | int, ...], TrainedTokens] = {}
        for name, tokens in adapter.tokens.items():
            own = next((specs[each] for each in module_names(name) if each in specs), None)
            if own is None:
                raise ConfigError(f"trained tokens must be in {list(specs)}, got rows for {name}")
            self._require(TRAINABLE_TOKENS, f"trained tokens, as in {name},")
            (num_rows, size), got = own.shape, tokens.rows.shape[1]
            if size != got or max(tokens.ids) >= num_rows:
                raise ConfigError(
                    f"trained tokens in {name} must have ids below {num_rows} and rows with {size} elements, got id "
                    f"{max(tokens.ids)} and {got} elements; the adapter was trained on another model"
                )
            if len(tokens.ids) > MAX_TRAINED_TOKENS:
                raise ConfigError(
                    f"an adapter must train at most {MAX_TRAINED_TOKENS} tokens in {name}, got {len(tokens.ids)}; "
                    "train the whole matrix with modules_to_save"
                )
            found[own.path] = tokens
        if self.arch.tied_embeddings and EMBED in found:
            found.setdefault(HEAD, found[EMBED])
        for name, module in adapter.modules.items():
            own = next((specs[each] for each in module_names(name) if each in specs), None)
            if own is not None and own.path in found and module.magnitude is not None:
                raise ConfigError(f"adapters must not have magnitudes (DoRA) and trained tokens in {name}; train one")
        return found

    def _require(self, extra: str, feature: str) -> None:
        """Raise ConfigError unless the stacks have an extra."""
        if extra not in self.extras:
            raise ConfigError(
                f"an adapter with {feature} needs lora_extras with {extra!r}, got {list(self.extras)}; start the "
                f"engine with lora_extras={[*self.extras, extra]}"
            )

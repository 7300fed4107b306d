"""LoRARequest: the LoRA adapter that a request is served with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

from jaxserve.api.schema import FILLED_TEXT, PATH, SWITCH, FieldType, Schema, integer
from jaxserve.errors import RequestError

# Features of adapters whose memory and time are only paid for with the engine option `lora_extras`.
EMBEDDINGS, MODULES_TO_SAVE, EXPERTS, LATENTS = "embeddings", "modules_to_save", "experts", "latents"
LORA_BIAS, USE_DORA, TRAINABLE_TOKENS = "lora_bias", "use_dora", "trainable_tokens"
LORA_EXTRAS = (EMBEDDINGS, MODULES_TO_SAVE, LORA_BIAS, USE_DORA, EXPERTS, LATENTS, TRAINABLE_TOKENS)

MAX_NAME_CHARS = 256  # replies list names


@no_type_check  # callers pass wrong types, which __post_init__ must reject with a RequestError
@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter, with vLLM's fields. Two are equal if their names are.

    Attributes:
        lora_name: name, unique in the engine; at most 256 characters.
        lora_int_id: positive number, as vLLM requires; it has no effect.
        lora_path: directory with PEFT's `adapter_config.json` and `adapter_model.safetensors`. It is read when the name
            is first used; empty for an adapter that has been loaded before.
        base_model_name: name of the model that it was trained on; it has no effect.
        load_inplace: read the directory again, and replace the adapter that has this name. Running requests finish with
            the old one.
        is_3d_lora_weight: True for experts' factors in one tensor per layer, as in vLLM; the file's tensors decide.

    Raises:
        RequestError: a field has a wrong type, or the name is too long.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        _SCHEMA.check(self)

    @property
    def name(self) -> str:
        """`lora_name`, as in vLLM."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`, as in vLLM."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


_SCHEMA = Schema(
    RequestError,
    LoRARequest,
    {
        "lora_name": FieldType(
            f"a string of 1 to {MAX_NAME_CHARS} characters",
            lambda value: isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS,
        ),
        "lora_int_id": integer(1),
        "lora_path": PATH,
        "base_model_name": FILLED_TEXT.optional(),
        "load_inplace": SWITCH,
        "is_3d_lora_weight": SWITCH,
    },
)

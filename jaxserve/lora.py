"""LoRA adapters, under the name of vLLM's package: `from jaxserve.lora import LoRARequest`."""

from jaxserve.api.lora_request import LoRARequest

__all__ = ["LoRARequest"]

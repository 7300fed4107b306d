"""Models that can be planned: checkpoints, config.json files, and packaged configs by name."""

from pathlib import Path
from typing import Any

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError, did_you_mean
from jaxserve.models import registry
from jaxserve.models.arch import ArchConfig
from jaxserve.weights.json_file import read_object

_CONFIGS = Path(__file__).parent / "configs"
_EMBEDDED = "the embedded model"


def known_models() -> list[str]:
    """Return the names of the packaged configs."""
    return sorted(file.stem for file in _CONFIGS.glob("*.json"))


def read_model(name: str | None, *, with_images: bool = False) -> tuple[str, ArchConfig]:
    """Read a checkpoint, a config.json or a packaged config; return its name and ArchConfig.

    Args:
        name: path or name; None for the embedded model.
        with_images: True to include the vision tower if the model has one.

    Raises:
        ConfigError: `name` is none of these, or the model is not supported.
    """
    path = EngineConfig(model=name).model_path
    known = known_models()
    if name is not None and not path.exists() and name in known:
        path = _CONFIGS / f"{name}.json"
    if not path.exists():
        like = path.name.lower().removesuffix("-instruct")  # a Hugging Face Hub name without its organisation
        hint = did_you_mean([like], known)
        raise ConfigError(f"model must be a checkpoint directory, a config.json or one of {known}, got {name!r}{hint}")
    return name or _EMBEDDED, registry.from_hf_config(_read_config(path), with_images=with_images)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the config in a config.json file, a checkpoint directory or a GGUF file; ConfigError if unreadable."""
    is_config = path.is_file() and path.suffix != ".gguf"
    with registry.config_errors():
        return read_object(path) if is_config else weights.read_config(path)

"""AdapterStore: adapters in host memory that leave it while they are read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.assembly.adapter_store import AdapterStore
from jaxserve.core.adapter_names import AdapterSource
from jaxserve.weights.adapter_files import CONFIG, TENSORS


class Layout:
    """Layout without devices."""

    def place(self, *_: object) -> dict[str, Any]:
        return {}


def write(path: Path, value: float) -> AdapterSource:
    path.mkdir()
    (path / CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 4}))
    shapes = {"lora_A": (4, 6), "lora_B": (8, 4)}
    save_file({f"q.{name}.weight": np.full(shape, value) for name, shape in shapes.items()}, path / TENSORS)
    return AdapterSource(str(path))


def test_an_adapter_unloaded_while_it_is_read_again_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its request was cancelled meanwhile, so that nothing would ever free it."""
    dropped: list[str] = []
    new: Any = AdapterStore
    store = new(Layout(), None, [(None, None)], 1, set, dropped.append)
    first, second = (store.load(write(tmp_path / str(value), value)).digest for value in (1.0, 2.0))
    assert store.path_to_read(first), "there is memory for one"
    read = store._read

    def unloaded_meanwhile(source: AdapterSource) -> Any:
        store.unload(first)
        return read(source)

    monkeypatch.setattr(store, "_read", unloaded_meanwhile)
    assert store.arrays(first) == {}
    assert [*store.loaded] == [second]
    assert dropped == [first]

"""LoRA adapters in one engine over several processes: the tokens of one process, and errors for their requests only."""

import json
import queue
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.api.config import EngineConfig
from jaxserve.api.lora_request import EMBEDDINGS, TRAINABLE_TOKENS, USE_DORA
from jaxserve.assembly import peer_adapters
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.assembly.peer_adapters import FollowerAdapters, OtherProcesses
from jaxserve.core.adapter_names import AdapterSource, LoadedAdapter
from jaxserve.core.event_log import event_from_json
from jaxserve.models.adapted_specs import adapted_specs
from jaxserve.weights.adapter_files import CONFIG, TENSORS
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import tokens
from tests.processes.adapters_leader import generate
from tests.processes.spawning import join, start
from tests.soon_compiled import few_programs

EXTRAS = [EMBEDDINGS, USE_DORA, TRAINABLE_TOKENS]
OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "compile_ahead": "minimal",
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 4,
    "max_cpu_loras": 2,
    "lora_extras": EXTRAS,
}
LEADER = Path(__file__).with_name("adapters_leader.py")


def write_adapters(llm: LLM, directory: Path) -> None:
    """Write adapters of all matrices, "b" with magnitudes and "c" with trained tokens, and copies of "b"."""
    arch, rng = llm.engine.arch, np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (0.2 * rng.normal(size=shape)).astype(np.float32)

    configs: dict[str, dict[str, Any]] = {"a": {}, "b": {"use_dora": True}, "c": {"trainable_token_indices": [5, 90]}}
    for name, config in configs.items():
        found = {}
        for each in adapted_specs(arch, arch, EXTRAS if name == "b" else ()):
            for part in each.parts:
                prefix, names = part.module, "lora_embedding_{}" if each.is_table else "lora_{}.weight"
                found[f"{prefix}.{names.format('A')}"] = draw(4, each.spec.shape[1])
                found[f"{prefix}.{names.format('B')}"] = draw(each.num_rows(part), 4)
                if name == "b":
                    found[f"{prefix}.lora_magnitude_vector"] = 1 + draw(each.num_rows(part))
        if name == "c":
            found["model.embed_tokens.token_adapter.trainable_tokens_delta"] = draw(2, arch.hidden_size)
        (directory / name).mkdir(parents=True)
        save_file({f"base_model.model.{key}": array for key, array in found.items()}, directory / name / TENSORS)
        (directory / name / CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 4, "peft_type": "LORA"} | config))
    for name in ("differs", "missing"):
        shutil.copytree(directory / "b", directory / name)
    (directory / "fades").mkdir()
    other = {key: 2 * array for key, array in load_file(directory / "a" / TENSORS).items()}
    save_file(other, directory / "fades" / TENSORS)
    shutil.copy(directory / "a" / CONFIG, directory / "fades")


class Wire:
    """Processes that take the leading one's events, as JSON, and answer."""

    name = "process 1"

    def __init__(self) -> None:
        self.loaded: list[AdapterSource] = []
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.follower = FollowerAdapters(cast("Any", self), cast("Any", self))

    def tell(self, event: Any) -> None:
        self.follower.take(cast("Any", event_from_json(json.loads(json.dumps(event)))))

    def ask(self, event: Any) -> list[str]:
        self.tell(event)
        return [self.answers.get(timeout=30)]

    def answer(self, text: str) -> None:
        self.answers.put(text)

    def load(self, source: AdapterSource, digest: str | None = None) -> LoadedAdapter:
        if digest is not None:
            self.loaded.append(source)
        return LoadedAdapter("digest")


def test_tensors_arrive_as_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_adapters, "PART_BYTES", 7)
    tensors = {"a": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), "b": np.ones((0, 2), np.float32)}
    given, wire = (
        AdapterSource("", {"r": 4, "target_modules": {"q_proj"}}, tensors | {"c": np.float32([[1e-30]])}),
        Wire(),
    )
    store = SimpleNamespace(loaded={}, load=wire.load)
    assert OtherProcesses(cast("Any", wire)).load(cast("Any", store), given).digest == "digest"
    [found] = wire.loaded
    assert (found.path, found.config) == ("", {"r": 4, "target_modules": ["q_proj"]})
    assert found.tensors is not None
    assert given.tensors is not None
    assert {*found.tensors} == {*given.tensors}
    for name, array in given.tensors.items():
        assert found.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(found.tensors[name], array)


@pytest.mark.long
def test_all_processes_load_the_same_adapters(tmp_path: Path) -> None:
    model, adapters, outputs = tmp_path / "model", tmp_path / "adapters", tmp_path / "outputs"
    write_checkpoint(model, "llama", num_attention_heads=8, head_dim=8, num_hidden_layers=2)
    with few_programs():
        llm = LLM.over(DrivenEngine(EngineConfig(str(model), **OPTIONS)))
    write_adapters(llm, adapters)
    prompts = [tokens(count, f"peers {count}") for count in (5, 7, 9, 4)]
    prompts[3][-2:] = [90, 5]
    (adapters / "prompts.json").write_text(json.dumps(prompts))
    expected = generate(llm, adapters, ["a", None, "b", "c"], prompts)
    assert len({tuple(ids) for ids in expected}) == len(expected)
    others = generate(llm, adapters, [None, "b", "b", "a"], prompts)
    given = json.dumps(OPTIONS | {"tensor_parallel_size": 2})
    command = [str(LEADER), "{address}", "{count}"]
    processes = start([[*command, str(index), *map(str, (model, adapters, outputs)), given] for index in range(2)], 1)
    for code, output in join(processes):
        assert code == 0, output
    found = json.loads(outputs.read_text())
    assert found["first"] == found["again"] == expected
    assert found["given"] == others, "tensors are sent, and adapters are read again"
    assert "all processes must have the adapter" in found["fades"]
    assert "all processes must have the adapter" in found["differs"]
    assert "its content must have digest" in found["differs"]
    assert "must be a directory with" in found["missing"]

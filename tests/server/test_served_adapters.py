"""LoRA adapters over HTTP: names in requests, loading by the operator's key, and paths that stay inside the root."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from jaxserve import LoRARequest, RequestError
from jaxserve.api.config import EngineConfig
from jaxserve.assembly.engine import Engine
from jaxserve.core.adapter_names import AdapterNames, AdapterSource, LoadedAdapter
from jaxserve.errors import ConfigError
from jaxserve.server.lora_modules import read_modules
from jaxserve.weights.adapter_files import CONFIG, TENSORS
from jaxserve.weights.safetensors_file import write_file
from tests.e2e.sizes import SIZES
from tests.server.conftest import Running, running
from tests.soon_compiled import few_programs


def write_adapter(path: Path, size: int, out: int, seed: int = 0) -> Path:
    """Write an adapter of the first layer's queries."""
    rng, prefix = np.random.default_rng(seed), "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    arrays = {
        f"{prefix}{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in {"A": (4, size), "B": (out, 4)}.items()
    }
    path.mkdir()
    (path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 64}))
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    write_file(path / TENSORS, shapes, arrays.__getitem__)
    return path


def test_modules_are_pairs_or_json():
    found = read_modules(["a=x/y=z", '{"name": "b", "path": "p", "base_model_name": "m", "is_3d_lora_weight": true}'])
    assert [(each.lora_name, each.lora_path, each.base_model_name) for each in found] == [
        ("a", "x/y=z", None),
        ("b", "p", "m"),
    ]


@pytest.mark.parametrize(
    "entry",
    [
        *("a", "=x", "a=", "{", '{"name": "a"}', '{"name": "a", "path": 1}', '{"name": "", "path": "p"}'),
        '{"name": "a", "path": "p", "is_3d_lora_weight": 1}',
    ],
)
def test_other_modules_are_refused(entry):
    with pytest.raises(ConfigError, match="lora_modules"):
        read_modules([entry])
    with pytest.raises(ConfigError, match="'a' twice"):
        read_modules(["a=x", "a=y"])


class TestNames:
    """Names of adapters, and what the core is told."""

    def setup_method(self) -> None:
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        self.names = AdapterNames(self.load, self.unloaded.append, is_enabled=True)

    def load(self, source: AdapterSource) -> LoadedAdapter:
        self.loaded.append(source.path)
        if source.path.endswith("bad"):
            raise ConfigError("it is bad")
        return LoadedAdapter(f"digest of {Path(source.path).name}", (7, 8) if source.path.endswith("late") else ())

    def test_a_name_is_read_once(self) -> None:
        request = LoRARequest("a", 1, "/x")
        assert self.names.resolve(request, [1]) == self.names.resolve(LoRARequest("a"), [2]) == ("digest of x", 0)
        assert self.names.resolve(None, [1]) == ("", 0)
        assert self.loaded == ["/x"]
        assert list(self.names) == ["a"]

    def test_an_activated_adapter_begins_at_its_last_invocation(self) -> None:
        late = LoRARequest("a", 1, "/late")
        assert self.names.resolve(late, [7, 8, 1, 7, 8, 2]) == ("digest of late", 3)
        assert self.names.resolve(late, [7, 8]) == ("digest of late", 0)
        assert self.names.resolve(late, [7, 1, 8]) == ("", 0), "without an invocation, it is the base model"

    def test_a_replaced_adapter_is_unloaded_once_no_name_has_it(self) -> None:
        self.names.load(LoRARequest("a", 1, "/x"))
        self.names.load(LoRARequest("b", 1, "/x"))
        self.names.load(LoRARequest("a", 1, "/y", load_inplace=True))
        assert self.unloaded == []
        assert self.names.remove("b") is not None
        assert self.unloaded == ["digest of x"]
        assert self.names.remove("b") is None

    def test_a_replaced_adapter_stays_while_requests_have_it(self) -> None:
        class Holder:
            """A request that was read."""

        first, second = Holder(), Holder()
        for path, holder in (("/x", first), ("/y", second)):
            digest, _ = self.names.resolve(LoRARequest("a", 1, path, load_inplace=True), [1])
            self.names.hold(digest, holder)
        assert self.unloaded == []
        self.names.remove("a")
        assert self.unloaded == []
        del first
        self.names.load(LoRARequest("b", 1, "/z"))
        assert self.unloaded == ["digest of x"]
        with pytest.raises(RequestError, match="unloaded meanwhile"):
            self.names.hold("digest of x", second)
        self.names.hold("digest of y", second)
        self.names.hold("", second)

    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            (LoRARequest("a", 1, "/other"), "choose another name"),
            (LoRARequest("new"), "must name the directory"),
            (LoRARequest("new", 1, "/bad"), "it is bad"),
        ],
    )
    def test_wrong_requests_are_refused(self, request_, message) -> None:
        self.names.load(LoRARequest("a", 1, "/x"))
        with pytest.raises(RequestError, match=message):
            self.names.resolve(request_, [1])
        assert list(self.names) == ["a"]


KEY = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(llama: Path, root: Path) -> Iterator[Running]:
    """Return a server with adapters: one from the start, one to be loaded."""
    with few_programs():
        engine = Engine(EngineConfig(str(llama), **SIZES, enable_lora=True, max_loras=1, max_lora_rank=4))
    arch = engine.arch
    sizes = arch.hidden_size, arch.attention.num_heads * arch.attention.head_dim
    for seed, name in enumerate(("first", "second")):
        write_adapter(root / name, *sizes, seed)
    write_adapter(root / "other", sizes[0] + 1, sizes[1])
    options = {"lora_modules": [f"one={root / 'first'}"], "lora_root": root, "admin_key": "operator"}
    with running(engine, served_model_name=["tiny"], **options) as server:
        yield server


def complete(server: Running, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 5, "temperature": 0, "logprobs": 2}
    return server.client.post("/v1/completions", json=body)


def test_requests_name_an_adapter_as_their_model(server):
    replies = [complete(server, name) for name in ("tiny", "one", "tiny", "one")]
    logprobs = [reply.json()["choices"][0]["logprobs"]["token_logprobs"] for reply in replies]
    assert logprobs[0] == logprobs[2] != logprobs[1] == logprobs[3]
    assert [reply.json()["model"] for reply in replies] == ["tiny", "one", "tiny", "one"]
    assert complete(server, "two").status_code == 404


def test_models_have_parent_and_root(server, root):
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert (cards["one"]["root"], cards["one"]["parent"]) == (str(root / "first"), "tiny")
    assert cards["tiny"]["parent"] is None
    assert server.client.get("/v1/models/one").json() == cards["one"]


def test_the_operator_loads_and_unloads(server):
    def call(path: str, headers: dict[str, str] = KEY, **body: object) -> httpx.Response:
        return server.client.post(f"/v1/{path}_lora_adapter", json=body, headers=headers)

    assert call("load", {}, lora_name="two", lora_path="second").status_code == 401
    assert call("load", {"Authorization": "Bearer x"}, lora_name="two", lora_path="second").status_code == 401
    loaded = call("load", lora_name="two", lora_path="second", base_model_name="trained")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    assert server.client.get("/v1/models/two").json()["parent"] == "trained"
    assert complete(server, "two").status_code == 200
    for body, status, message in (
        ({"lora_name": "two", "lora_path": "second"}, 400, "loaded already"),
        ({"lora_name": "tiny", "lora_path": "second"}, 400, "must not be one of the model's"),
        ({"lora_name": "x", "lora_path": "../.."}, 400, "inside --lora-root"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "inside --lora-root"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 400, "must be a path"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, 400, "must be a path"),
        ({"lora_name": "x", "lora_path": "none"}, 404, "must be a directory"),
        ({"lora_name": "x", "lora_path": "other"}, 400, "it was trained on another model"),
        ({"lora_name": "x"}, 400, "lora_path"),
        *(({"lora_name": name, "lora_path": "second"}, 400, "1 to 256 characters") for name in ("", "x" * 257)),
    ):
        refused = call("load", **body)
        assert (refused.status_code, message in refused.text) == (status, True), refused.text
    assert call("load", lora_name="two", lora_path="first", load_inplace=True).status_code == 200
    assert complete(server, "two").json()["choices"] == complete(server, "one").json()["choices"]
    assert call("unload", lora_name="two").text == "Success: LoRA adapter 'two' removed successfully."
    assert call("unload", lora_name="two").status_code == 404
    assert complete(server, "two").status_code == 404


def test_metrics_name_the_adapters(server):
    assert 'max_lora="1"' in server.client.get("/metrics").text

"""vLLM's `kv_transfer_config` means the same tiers, and nothing in it is ignored."""

import json
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.vllm_options import engine_options
from jaxserve.errors import ConfigError

GIB = 2**30
EXTRA = {"cpu_bytes_to_use": 3 * GIB}
CONFIG = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
DISK = {"type": "fs", "root_dir": "/var/tmp/kv"}


@pytest.mark.parametrize("read", [dict, json.dumps])
def test_an_offloading_connector_is_two_tiers(read: Any) -> None:
    def options(**extra: Any) -> dict[str, Any]:
        config = read(CONFIG | {"kv_connector_extra_config": EXTRA | extra})
        return engine_options({"kv_transfer_config": config, "seed": 5})

    assert options() == {"kv_offloading_size": 3, "seed": 5}
    assert options(eviction_policy="lru", secondary_tiers=[]) == {"kv_offloading_size": 3, "seed": 5}
    assert options(eviction_policy="arc", cpu_bytes_to_use=1.5 * GIB) == {"kv_offloading_size": 1.5, "seed": 5}
    both = {"kv_offloading_size": 3, "kv_offloading_path": "/var/tmp/kv", "seed": 5}
    assert options(secondary_tiers=[DISK], spec_name="TieringOffloadingSpec") == both


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        (
            {"kv_connector": "MooncakeConnector"},
            {},
            "kv_connector in kv_transfer_config must be 'OffloadingConnector' or 'ExampleConnector' or .* got 'Moon",
        ),
        ({"kv_role": "kv_producer"}, {}, "kv_role in kv_transfer_config must be 'kv_both', got 'kv_producer'"),
        ({"kv_load_failure_policy": "fail"}, {}, "kv_load_failure_policy in kv_transfer_config must be 'recompute'"),
        ({"kv_port": 1}, {}, "kv_transfer_config has the unsupported key 'kv_port'; supported keys are"),
        ({}, {"cpu_bytes_to_use": 0}, "cpu_bytes_to_use in kv_connector_extra_config of kv_transfer_config must be"),
        ({}, {"cpu_bytes_to_use": None}, "cpu_bytes_to_use in kv_connector_extra_config of kv_transfer_config must be"),
        (
            {},
            {"block_size": 64},
            "kv_connector_extra_config of kv_transfer_config has the unsupported key 'block_size'",
        ),
        (
            {},
            {"eviction_policy": "fifo"},
            "eviction_policy in kv_connector_extra_config .* must be 'lru' or 'arc', got",
        ),
        ({}, {"secondary_tiers": [DISK, DISK]}, "secondary_tiers .* must be a list with at most one dict"),
        ({}, {"secondary_tiers": [{"type": "p2p"}]}, "type in a secondary tier of kv_transfer_config must be 'fs'"),
        ({}, {"secondary_tiers": [{"type": "fs"}]}, "must have type 'fs' and a root_dir, got"),
        ({}, {"secondary_tiers": [DISK | {"n": 1}]}, "a secondary tier of kv_transfer_config has the unsupported key"),
    ],
)
def test_anything_else_is_refused_by_name(config: dict[str, Any], extra: dict[str, Any], message: str) -> None:
    given = CONFIG | {"kv_connector_extra_config": EXTRA | extra} | config
    with pytest.raises(ConfigError, match=message):
        engine_options({"kv_transfer_config": given})


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_engines_share_a_directory(role: str) -> None:
    config = {"kv_connector": "ExampleConnector", "kv_role": role}
    config["kv_connector_extra_config"] = extra = {"shared_storage_path": "/mnt/kv"}
    assert engine_options({"kv_transfer_config": config}) == {"kv_store": "/mnt/kv", "kv_role": role}
    for wrong, message in (
        ({}, "shared_storage_path in kv_connector_extra_config .* must be a directory, got None"),
        (extra | {"backends": ["UCX"]}, "has the unsupported key 'backends'"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_options({"kv_transfer_config": config | {"kv_connector_extra_config": wrong}})


def test_a_direct_transfer_is_a_role_before_a_store() -> None:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    given = {"kv_transfer_config": json.dumps(config)}
    options = engine_options(given | {"kv_store": "/mnt/kv"})
    assert options == {"kv_store": "/mnt/kv", "kv_role": "kv_producer"}
    with pytest.raises(ConfigError, match="kv_role needs kv_store, got only 'kv_producer'"):
        EngineConfig("model", **engine_options(given))
    for changed in ({"kv_role": "kv_both"}, {"kv_role": None}, {"kv_buffer_device": "cpu"}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            engine_options({"kv_transfer_config": config | changed})


def test_it_is_an_object_and_the_only_source_of_its_options() -> None:
    assert engine_options({"kv_transfer_config": None}) == {}
    for value in ("{", [], {"kv_role": "kv_both"}, 5):
        with pytest.raises(ConfigError, match="kv_transfer_config must"):
            engine_options({"kv_transfer_config": value})
    given = CONFIG | {"kv_connector_extra_config": EXTRA}
    with pytest.raises(ConfigError, match="kv_transfer_config sets kv_offloading_size; pass one of them, got both"):
        engine_options({"kv_transfer_config": given, "kv_offloading_size": 1})

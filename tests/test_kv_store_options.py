"""Options of shared stores: bad ones are refused, without credentials in any message."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.kv_store_config import KVStoreConfig
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("redis://user:secret@host:99999/0", "url of kv_store must be .* got 'redis://host:99999/0'"),
        ("redis://:secret@host/0?nonsense=1", "url of kv_store must be"),
        ("redis://host?", None),
        ("redis://host/db", "url of kv_store must be"),
        ("http://host", "url of kv_store must be"),
        ("unix:?db=0", "url of kv_store must be"),
        ("unix:/run/redis?db=x", "url of kv_store must be"),
        ("", "url of kv_store must be"),
        (5, "kv_store must be a directory"),
        ({"url": "/tmp", "ttl": 5}, "unsupported kv_store"),
        ({"url": "/tmp", "ttl_s": 0}, "ttl_s of kv_store must be"),
        ({"ttl_s": 5}, "kv_store must have a url"),
        ("redis:/user:secret@host", "url of kv_store must be"),
        ("redis://user:secret", "url of kv_store must be .* got 'redis://...'"),
        ("redis://host:0", "url of kv_store must be"),
        ("redis://host/0?password=secret", "url of kv_store must be .* got 'redis://host/0'"),
        ("redis://host/0?password=x@secret", "url of kv_store must be .* got 'redis://...'"),
        ("redis://user:x?secret@host", "url of kv_store must be .* got 'redis://...'"),
        ("unix:/run/redis?db=0&password=secret", "url of kv_store must be .* got 'unix:/run/redis'"),
        (["redis://:secret@host"], "kv_store must be a directory"),
        ('{"url": "redis://:secret@host"', "kv_store must be a directory"),
        ({"url": ["redis://:secret@host"]}, "url of kv_store must be"),
        ({"urls": "redis://:secret@host"}, "unsupported kv_store"),
        *[({"url": "/tmp", name: 1e300}, f"{name} of kv_store must be") for name in ("ttl_s", "timeout_s", "size_gib")],
    ],
)
def test_bad_options_are_one_line_without_credentials(value: Any, words: str | None) -> None:
    if words is None:
        KVStoreConfig.from_value(value)
        return
    with pytest.raises(ConfigError, match=words) as raised:
        EngineConfig(kv_store=value)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_combinations_are_refused_without_credentials(tmp_path: Path) -> None:
    config = KVStoreConfig("redis://user:secret@127.0.0.1:1/0")
    assert "secret" not in repr(config)
    with pytest.raises(ConfigError, match=r"kv_store must be None with .*127\.0\.0\.1:1/0") as refused:
        EngineConfig(kv_store=config, sparse_attention={"method": "quest", "budget": 64})
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="kv_role needs kv_store"):
        EngineConfig(kv_role="kv_producer")
    short = tmp_path / "key"
    short.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="key_file of kv_store must have 16 to 64 bytes, got 5"):
        KVStoreConfig("/tmp", key_file=str(short)).read_key()

"""Page hashes: equal only if all that keys and values depend on is equal."""

from simulation import make_request

from jaxserve.scheduling.kv_cache.prefix_hashes import PrefixHashes

TOKENS = list(range(12))


def hashes(**fields: object) -> list[bytes]:
    return PrefixHashes(4).full_pages(make_request("it", TOKENS, **fields))


def test_pages_belong_to_an_adapter_from_its_first_token_on() -> None:
    base, whole, late = hashes(), hashes(adapter="a"), hashes(adapter="a", adapter_start=5)
    assert not {*base} & {*whole}
    assert not {*whole} & {*hashes(adapter="b")}
    assert late[0] == base[0]
    assert not {*late[1:]} & {*base, *whole}
    assert hashes(adapter="a", adapter_start=12) == base


def test_pages_whose_adapters_begin_at_different_tokens_differ() -> None:
    first, second = (hashes(adapter="a", adapter_start=start) for start in (4, 6))
    assert first[0] == second[0]
    assert not {*first[1:]} & {*second[1:]}

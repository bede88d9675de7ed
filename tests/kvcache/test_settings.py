"""The cache's settings: what is refused, and in which words."""

from __future__ import annotations

import msgspec
import pytest

from kvcache.settings import KVCacheSettings


def test_the_defaults_are_eight_bits_and_kept_prefixes() -> None:
    assert KVCacheSettings() == KVCacheSettings(bits="8", pool_tokens=None, prefix_cache=True)


@pytest.mark.parametrize("pool_tokens", [-1, 0, 63])
def test_a_pool_under_one_page_is_refused(pool_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"pool_tokens is {pool_tokens}: use at least 64"):
        KVCacheSettings(pool_tokens=pool_tokens)


def test_no_states_at_all_is_refused_with_what_does_that() -> None:
    with pytest.raises(ValueError, match=r"states is 0: use at least 1.*prefix_cache false"):
        KVCacheSettings(states=0)


def test_without_a_prefix_cache_no_states_are_kept() -> None:
    assert KVCacheSettings(states=0, prefix_cache=False).states == 0
    with pytest.raises(ValueError, match="states is -1"):
        KVCacheSettings(states=-1, prefix_cache=False)


def test_no_small_states_are_a_choice_and_fewer_are_refused() -> None:
    assert KVCacheSettings(small_states=0).small_states == 0
    with pytest.raises(ValueError, match=r"small_states is -1: use 0 \(none\) or more"):
        KVCacheSettings(small_states=-1)


def test_unknown_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits is '4': use '8'"):
        KVCacheSettings(bits="4")  # type: ignore[arg-type]


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="pool_pages"):
        msgspec.convert({"pool_pages": 4}, KVCacheSettings)

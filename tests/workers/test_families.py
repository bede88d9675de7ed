from __future__ import annotations

from typing import Any

import pytest

from workers.errors import ModelError, UnsupportedModel
from workers.families import FAMILIES, check_config, rope_overrides
from workers.ledger import shape_of

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
LLAMA = {"model_type": "llama", **SIZES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_dense_families_work(family: str) -> None:
    check_config(SIZES | {"model_type": family})


@pytest.mark.parametrize(
    "extra",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
        {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
        {"trust_remote_code": False, "auto_map": None},
    ],
)
def test_features_that_work(extra: dict[str, Any]) -> None:
    check_config(LLAMA | extra)


def test_a_switched_off_window_of_qwen_works() -> None:
    config = SIZES | {"model_type": "qwen2", "num_hidden_layers": 28, "sliding_window": 32768}
    check_config(config | {"use_sliding_window": False})
    check_config(config | {"use_sliding_window": True, "max_window_layers": 28})
    with pytest.raises(UnsupportedModel, match="sliding-window attention"):
        check_config(config | {"use_sliding_window": True, "max_window_layers": 21})


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"model_type": "mamba2"}, "'mamba2'"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'"),
        ({"auto_map": {"AutoModel": "modelling.Model"}}, "auto_map"),
        ({"model_file": "model.py"}, "model_file"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention layers"),
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, r"sliding-window attention \(4096"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic-NTK rope"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope rope"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
    ],
)
def test_what_does_not_work_is_named_with_what_does(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        check_config(SIZES | {"model_type": "mistral"} | extra)
    assert "works: llama, mistral, qwen2, qwen3" in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"model_type": None},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": "yarn"},
    ],
)
def test_a_broken_config_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        check_config(LLAMA | extra)


WRONG_SIZES: list[Any] = [0, -1, 2.0, "256", True, [256], 2**40, float("nan")]


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        check_config(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", SIZES)
def test_a_missing_or_wrong_size_is_named(name: str) -> None:
    without = {key: value for key, value in LLAMA.items() if key != name}
    assert f"{name} is missing" in refusal(without)
    assert f"{name} is missing" in refusal(LLAMA | {name: None})
    for value in WRONG_SIZES:
        assert f"{name} is {value!r}" in refusal(LLAMA | {name: value})


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_a_size_that_may_be_left_out_must_be_right_when_given(name: str) -> None:
    check_config(LLAMA | {name: None})
    for value in WRONG_SIZES:
        assert f"{name} is {value!r}" in refusal(LLAMA | {name: value})


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1.0, "1e-5", float("inf"), float("nan"), None])
def test_a_wrong_real_number_is_named(name: str, value: Any) -> None:
    assert f"the config's {name} is" in refusal(LLAMA | {name: value})


def test_sizes_that_do_not_divide_are_named() -> None:
    assert "num_key_value_heads is 3" in refusal(LLAMA | {"num_key_value_heads": 3})
    assert "num_attention_heads is 3" in refusal(LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3})
    check_config(LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64})


def test_a_checked_config_has_a_shape() -> None:
    check_config(LLAMA)
    assert shape_of(LLAMA, native_bytes=1).head_dim == 64


def test_nested_rope_parameters_are_lifted_to_where_mlx_lm_reads_them() -> None:
    nested = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    found = rope_overrides({"rope_parameters": nested})
    assert found == {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert rope_overrides({"rope_parameters": nested, "rope_theta": 1e4, "rope_scaling": nested}) == {}
    assert rope_overrides({"rope_theta": 1e4}) == {}

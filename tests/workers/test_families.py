from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_models import MIXED_FAMILIES, NESTED_FAMILIES, mixed_config
from workers.architectures import is_attention_layer, is_sparse_layer, text_config
from workers.errors import ModelError, UnsupportedModel
from workers.families import FAMILIES, check_config, left_out, rope_overrides
from workers.shapes import shape_of

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
LLAMA = {"model_type": "llama", **SIZES}


DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def mixed(family: str, **changes: Any) -> dict[str, Any]:
    return text_config(mixed_config(family, changes))


def qwen3_5(**rope: Any) -> dict[str, Any]:
    nested = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return mixed("qwen3_5", rope_parameters=nested | rope)


def test_the_families_are_those_of_the_design() -> None:
    assert list(FAMILIES) == [*DENSE_FAMILIES, *MIXED_FAMILIES]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_the_dense_families_work(family: str) -> None:
    check_config(SIZES | {"model_type": family})


@pytest.mark.parametrize("family", MIXED_FAMILIES)
def test_the_families_with_experts_or_states_work(family: str) -> None:
    check_config(mixed(family))


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
        ({"model_type": "qwen3_5_text"}, "'qwen3_5_text'"),
        ({"num_experts": 8}, "8 experts"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers"),
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


@pytest.mark.parametrize("family", NESTED_FAMILIES)
def test_a_nested_config_is_flattened_under_the_outer_type(family: str) -> None:
    published = mixed_config(family, {"vocab_size": 333}) | {"quantization": {"bits": 4, "group_size": 64}}
    flat = text_config(published)
    assert (flat["model_type"], flat["vocab_size"], flat["hidden_size"]) == (family, 333, 128)
    assert flat["quantization"] == {"bits": 4, "group_size": 64}
    assert text_config(flat) == flat
    assert "text_config" in published


def test_only_the_inner_word_on_tied_embeddings_counts() -> None:
    published = mixed_config("qwen3_5", {"tie_word_embeddings": False}) | {"tie_word_embeddings": True}
    assert text_config(published)["tie_word_embeddings"] is False


def test_every_nth_layer_of_a_hybrid_is_attention() -> None:
    config = mixed("qwen3_next", num_hidden_layers=8)
    assert [layer for layer in range(8) if is_attention_layer(config, layer)] == [3, 7]
    assert all(is_attention_layer(mixed("qwen3_moe"), layer) for layer in range(4))


def test_experts_are_where_the_config_puts_them() -> None:
    config = mixed("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3])
    check_config(config)
    assert [layer for layer in range(4) if is_sparse_layer(config, layer)] == [1]
    assert [is_sparse_layer(mixed("qwen3_5_moe"), 0), is_sparse_layer(mixed("qwen3_5"), 0)] == [True, False]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (mixed("qwen3_moe", rope_scaling=YARN), r"yarn rope \(mlx-lm would ignore it\)"),
        (mixed("qwen3_moe", use_sliding_window=True, sliding_window=4096), "sliding-window attention"),
        (mixed("qwen3_moe", attention_bias=True), "attention_bias"),
        (mixed("qwen3_moe", partial_rotary_factor=0.5), "a part of each head"),
        (SIZES | {"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        (mixed("qwen3_next", layer_types=["linear_attention"] * 4), "linear_attention at layer 3"),
        (mixed("qwen3_next", layer_types=["full_attention"] * 4), "full_attention at layer 0"),
        (mixed("qwen3_next", layer_types=["chunked_attention"] * 4), "chunked_attention layers"),
        (mixed("qwen3_next", rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic-NTK rope"),
        (mixed("qwen3_5", attn_output_gate=False), "attn_output_gate"),
        (mixed("qwen3_5", output_gate_type="sigmoid"), "output_gate_type 'sigmoid'"),
        (mixed("qwen3_5", num_experts=8), "8 experts"),
        (qwen3_5(rope_type="longrope", factor=4.0), "longrope rope"),
        (mixed("qwen3_5_moe", mlp_only_layers=[1]), "layers without experts"),
        (mixed("qwen3_5_moe", decoder_sparse_step=2), "layers without experts"),
        (mixed("qwen3_moe", quantize_activations=True), "quantised activations"),
        (LLAMA | {"quantization": {"bits": 4, "group_size": 64, "mode": "int4"}}, "quantisation mode 'int4'"),
        (
            LLAMA | {"quantization": {"bits": 4, "group_size": 16, "a.b": {"global_scale": True}}},
            "global scale",
        ),
        (mixed("qwen3_5_moe", quantization_config={"quant_method": "fp8"}), "fp8 quantisation"),
        (LLAMA | {"quantization_config": {"quant_method": "bitnet"}}, "bitnet quantisation"),
    ],
)
def test_what_mlx_lm_would_run_half_right_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        check_config(config)
    assert "works: llama" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        mixed("qwen3_next", rope_scaling=YARN, attention_bias=True),
        mixed("qwen3_moe", use_sliding_window=False, sliding_window=4096, max_window_layers=2),
        qwen3_5(**YARN),
        qwen3_5(rope_type="linear", factor=2.0),
        mixed("qwen3_5", layer_types=None, full_attention_interval=2),
        mixed("qwen3_5_moe", mlp_only_layers=[], decoder_sparse_step=1, output_gate_type="swish"),
        LLAMA | {"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4", "lm_head": False}},
        LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
)
def test_variants_that_mlx_lm_runs_are_taken(config: dict[str, Any]) -> None:
    check_config(config)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize(
    "name",
    [
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_conv_kernel_dim", "num_key_value_heads", "max_position_embeddings"),
    ],
)
def test_a_missing_or_wrong_size_of_a_hybrid_is_named(family: str, name: str) -> None:
    assert f"{name} is missing" in refusal(mixed(family, **{name: None}))
    for value in (0, 2.0, "2", True):
        assert f"{name} is {value!r}" in refusal(mixed(family, **{name: value}))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_or_wrong_size_of_experts_is_named(family: str, name: str) -> None:
    assert f"{name} is missing" in refusal(mixed(family, **{name: None}))
    assert f"{name} is 0" in refusal(mixed(family, **{name: 0}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (mixed("qwen3_next", linear_num_value_heads=3), "linear_num_value_heads is 3; it must be a multiple"),
        (mixed("qwen3_next", linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1; it must be at least 2"),
        (mixed("qwen3_next", full_attention_interval=5), "full_attention_interval is 5"),
        (mixed("qwen3_next", full_attention_interval=1), "full_attention_interval is 1"),
        (mixed("qwen3_next", layer_types=["linear_attention"]), "layer_types is"),
        (
            mixed("qwen3_next", shared_expert_intermediate_size=None),
            "shared_expert_intermediate_size is",
        ),
        (mixed("qwen3_next", partial_rotary_factor=None), "partial_rotary_factor is missing"),
        (mixed("qwen3_next", partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
        (mixed("qwen3_next", partial_rotary_factor=0.3), "partial_rotary_factor is 0.3; it must be an even"),
        (mixed("qwen3_next", rope_theta=None), "rope_theta is missing"),
        (
            mixed("qwen3_moe", num_experts_per_tok=9),
            "num_experts_per_tok is 9; it must be at most",
        ),
        (mixed("qwen3_moe", mlp_only_layers=None), "mlp_only_layers is missing"),
        (mixed("qwen3_moe", decoder_sparse_step=None), "decoder_sparse_step is missing"),
        (mixed("qwen3_moe", norm_topk_prob="yes"), "norm_topk_prob is 'yes'"),
        (mixed("qwen3_5", rope_parameters=None), "no rope_parameters with a rope_theta"),
        (mixed("qwen3_5", rope_scaling=YARN), "rope_scaling beside rope_parameters"),
        (LLAMA | {"quantization": 4}, "quantization is not a table"),
        (LLAMA | {"quantization": {"bits": 4}}, "quantization.group_size is missing"),
    ],
)
def test_a_broken_mixed_config_is_refused_by_the_field(config: dict[str, Any], words: str) -> None:
    assert words in refusal(config)


def test_what_is_not_loaded_is_said() -> None:
    assert left_out(mixed("qwen3_5")) == [
        "its vision part is not loaded: it reads text only",
        "its layers for multi-token prediction are not loaded",
    ]
    assert left_out(LLAMA) == []


def test_rope_parameters_of_a_hybrid_go_where_mlx_lm_reads_them() -> None:
    nested = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = mixed("qwen3_next", rope_theta=None, partial_rotary_factor=None, rope_parameters=nested)
    check_config(config)
    assert rope_overrides(config) == {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert rope_overrides(mixed("qwen3_5")) == {}
    assert rope_overrides(mixed_config("qwen3_5", {})) == {}

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.utils import load, load_model

from tests.workers.gguf_files import BF16, F16, F32, Q4_0, Q4_1, Q5_0, Q8_0, GgufFile, rounded, tiny_llama
from workers.errors import ModelError, UnsupportedModel
from workers.gguf import convert_gguf, llama3_scaling


def convert(file: GgufFile, tmp_path: Path) -> Path:
    target = tmp_path / "a folder" / "model"
    convert_gguf(file.write(tmp_path / "tiny.gguf"), target)
    return target


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q4_0, Q4_1, Q8_0])
def test_each_tensor_type_keeps_its_values(kind: int, tmp_path: Path) -> None:
    file = tiny_llama(kind)
    if kind == BF16:
        file.tensors = {
            name: (np.round(values * 64).astype(np.float32) / np.float32(64), each)
            for name, (values, each) in file.tensors.items()
        }
    folder = convert(file, tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.1.mlp.down_proj"
    found = weights[f"{name}.weight"]
    if kind in (Q4_0, Q4_1, Q8_0):
        scales, biases = (weights[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        bits = 8 if kind == Q8_0 else 4
        assert config_of(folder)["quantization"] == {"group_size": 32, "bits": bits}
        found = mx.dequantize(found, scales, biases, group_size=32, bits=bits)
    expected = rounded(file.tensors["blk.1.ffn_down.weight"][0], kind)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, atol=2e-4)


def permuted(values: Any, heads: int) -> Any:
    """What the llama converter does to the rows of q and k: halves of a head become pairs."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def test_interleaved_rope_undoes_the_converters_permutation(tmp_path: Path) -> None:
    plain = tiny_llama()
    moved = tiny_llama()
    for name, (values, kind) in plain.tensors.items():
        if "attn_q." in name or "attn_k." in name:
            moved.tensors[name] = (permuted(values, 4 if "attn_q" in name else 2), kind)
    model, _ = load_model(convert(moved, tmp_path))
    folder = tmp_path / "plain"
    convert_gguf(plain.write(tmp_path / "plain.gguf"), folder)
    reference, _ = load_model(folder, model_config={"rope_traditional": False})
    ids = mx.arange(3, 40)[None]
    assert config_of(folder)["rope_traditional"] is True
    assert mx.allclose(model(ids), reference(ids), atol=1e-5).item()


def test_mixed_widths_load_in_mlx_lm_with_tokenizer_and_template(tmp_path: Path) -> None:
    file = tiny_llama(Q4_1)
    file.tensors["token_embd.weight"] = (file.tensors["token_embd.weight"][0], Q8_0)
    file.tensors["blk.0.attn_v.weight"] = (file.tensors["blk.0.attn_v.weight"][0], F16)
    folder = convert(file, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, tokenizer = load(str(folder))[:2]
    assert config_of(folder)["quantization"]["model.embed_tokens"]["bits"] == 8
    assert "scales" not in model.model.layers[0].self_attn.v_proj
    assert tokenizer.eos_token_ids == {2}
    messages = [{"role": "user", "content": "the 1234"}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>the 1234"
    assert ids[0] == 1
    assert model(mx.array([ids])).shape[-1] == len(file.metadata["tokenizer.ggml.tokens"])


def test_the_context_and_the_untied_head_are_read(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors["output.weight"] = (file.tensors["token_embd.weight"][0], F16)
    file.metadata["llama.rope.scaling.type"] = "yarn"
    file.metadata["llama.rope.scaling.factor"] = 4.0
    file.metadata["llama.rope.scaling.original_context_length"] = 128
    config = config_of(convert(file, tmp_path))
    assert config["max_position_embeddings"] == 512
    assert config["tie_word_embeddings"] is False
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert config["rope_scaling"] == expected


def test_a_truncated_file_is_named_at_any_length_and_leaves_nothing(tmp_path: Path) -> None:
    whole = tiny_llama(Q8_0).write(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    target = tmp_path / "models" / "cut"
    for length in (0, 3, 4, 20, 100, 1000, 5000, len(whole) // 2, len(whole) - 3000):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"^cut\.gguf: [^\n]*$"):
            convert_gguf(cut, target)
    assert not target.exists()
    assert not list((tmp_path / "models").glob("*")) if target.parent.exists() else True


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf: cannot be read: No such file"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path / "model")


QUERY = tiny_llama().tensors["blk.0.attn_q.weight"][0]


@pytest.mark.parametrize(
    ("metadata", "tensors", "kind", "words"),
    [
        ({"general.architecture": "mamba"}, {}, UnsupportedModel, "'mamba' does not work here; works: llama"),
        ({"llama.expert_count": 8}, {}, UnsupportedModel, "expert_count"),
        ({"split.count": 2}, {}, UnsupportedModel, "merge the parts"),
        ({}, {"blk.0.ffn_up.weight": None}, ModelError, r"blk\.0\.ffn_up\.weight' is missing"),
        ({}, {"blk.0.ssm_in.weight": (QUERY, F32)}, UnsupportedModel, "ssm_in"),
        ({}, {"blk.0.attn_q.weight": (QUERY, Q5_0)}, ModelError, "Q4_0, Q4_1, Q8_0"),
        ({}, {"blk.0.attn_q.weight": (np.full_like(QUERY, np.nan), F32)}, ModelError, "not finite"),
        ({"llama.block_count": None}, {}, ModelError, r"llama\.block_count' is missing"),
        ({"llama.block_count": "two"}, {}, ModelError, r"llama\.block_count' is not a number"),
        (
            {"tokenizer.ggml.pre": "martian"},
            {},
            UnsupportedModel,
            "'martian' is not known here; works: gpt-2",
        ),
        ({"tokenizer.ggml.model": "t5"}, {}, UnsupportedModel, "'t5'; works: gpt2, llama"),
        ({"tokenizer.ggml.merges": ["no such"]}, {}, ModelError, "merges do not fit"),
        ({"tokenizer.ggml.eos_token_id": 100_000}, {}, ModelError, "eos_token_id is 100000"),
        ({"llama.rope.scaling.type": "longrope"}, {}, UnsupportedModel, "'longrope'"),
        (
            {},
            {"rope_freqs.weight": (np.linspace(1, 9, 8, dtype=np.float32), F32)},
            UnsupportedModel,
            "not those of Llama 3",
        ),
    ],
)
def test_an_odd_file_is_refused_in_one_line(
    metadata: dict[str, Any], tensors: dict[str, Any], kind: type[ModelError], words: str, tmp_path: Path
) -> None:
    file = tiny_llama(layers=1)
    file.metadata = {key: value for key, value in (file.metadata | metadata).items() if value is not None}
    file.tensors = {name: value for name, value in (file.tensors | tensors).items() if value is not None}
    with pytest.raises(kind, match=words) as caught:
        convert(file, tmp_path)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("tiny.gguf: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_again_from_the_factors(factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = Llama3RoPE(64, base=500000.0, scaling_config=scaling)
    plain = 500000.0 ** (mx.arange(0, 64, 2) / 64)
    factors: Any = (rope._freqs / plain).tolist()
    assert llama3_scaling(factors, 64, 500000.0) == pytest.approx(scaling)

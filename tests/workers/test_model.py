from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest

from tests.models import Reference, make_model
from tests.workers.hybrid_steps import EXACT, Dense, HandDriven, difference
from tests.workers.test_parity import prompt_of
from workers.errors import ModelError
from workers.folder import check_folder
from workers.model import load, read_tokenizer
from workers.settings import EngineSettings


def test_special_tokens_are_texts_of_real_tokens_and_no_switches(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    written = {
        "add_bos_token": True,
        "add_eos_token": False,
        "eos_token": {"content": "<|end|>", "special": True},
        "pad_token": "<|end|>",
        "unk_token": "<|nowhere|>",
        "mask_token": None,
        "sep_token": {"special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    _, bundle = read_tokenizer(folder, check_folder(folder))
    assert bundle.special_tokens == {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    assert bundle.eos_token_ids == (256,)


def test_narrow_experts_are_refused_on_a_cpu_with_the_remedy(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3_moe", dtype="bfloat16")
    settings = EngineSettings(model=str(folder), weights="native")
    if mx.metal.is_available():
        assert load(settings).weights == "bfloat16"
    else:
        with pytest.raises(ModelError, match="not in bfloat16: use --weights fp32"):
            load(settings)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("weights", ["fp32", "native"])
def test_mixed_four_and_eight_bit_checkpoints_give_mlx_lms_logits(
    tmp_path: Path, family: str, weights: Literal["fp32", "native"]
) -> None:
    folder = make_model(tmp_path / "model", family, bits=4)
    dense = Dense(Reference(folder, fp32=weights == "fp32").model)
    driven = HandDriven(folder, weights=weights)
    stream, prompt = driven.stream(0), prompt_of(70)
    assert difference(driven.feed(stream, prompt), dense.after(prompt)) < EXACT
    assert difference(driven.feed(stream, [5]), dense.after(stream.tokens)) < EXACT

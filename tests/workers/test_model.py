from __future__ import annotations

import json
from pathlib import Path

from tests.models import make_model
from workers.folder import check_folder
from workers.model import read_tokenizer


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

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import sentencepiece

from tests.workers.gguf_files import tokenizer_metadata
from workers.errors import ModelError
from workers.gguf_metadata import Metadata
from workers.gguf_tokenizer import read_tokenizer


def test_byte_level_text_comes_back_and_digits_stand_alone() -> None:
    tokenizer = read_tokenizer(Metadata("file", tokenizer_metadata())).tokenizer
    text = "the 1234 houses, naïve 漢字 👩‍👩‍👧 \t\n  end"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids) == text
    assert [token for token in encoding.tokens if token.isdigit()] == ["1", "2", "3", "4"]
    assert "Ġthe" in tokenizer.encode("is the").tokens


def test_without_digit_splitting_numbers_merge() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.pre": "gpt-2"}
    assert "1234" in read_tokenizer(Metadata("file", metadata)).tokenizer.encode("1234").tokens


def test_control_tokens_are_one_id_and_hidden_from_decoded_text() -> None:
    tokenizer = read_tokenizer(Metadata("file", tokenizer_metadata())).tokenizer
    ids = tokenizer.encode("<|im_start|>the<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "the"


def test_a_bos_token_is_added_when_the_file_says_so() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.add_bos_token": True}
    read = read_tokenizer(Metadata("file", metadata))
    assert read.tokenizer.encode("the").ids[0] == read.bos_id == 1
    assert read.tokenizer.encode("the", add_special_tokens=False).ids[0] != 1


def test_an_end_of_turn_token_ends_a_turn_too() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.eot_token_id": 0}
    assert read_tokenizer(Metadata("file", metadata)).eos_ids == (2, 0)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_the_other_pre_tokenizers_round_trip(pre: str) -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.pre": pre}
    tokenizer = read_tokenizer(Metadata("file", metadata)).tokenizer
    text = "It's the 12345th\r\n\r\n  naïve 漢字!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_token_types_must_cover_the_tokens() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.token_type": [1, 1]}
    with pytest.raises(ModelError, match="but 2 token types"):
        read_tokenizer(Metadata("file", metadata))


@pytest.fixture(scope="module")
def pieces() -> Any:
    words = "the cache holds pages of tokens that each worker wrote before another reads"
    rng = random.Random(1)
    lines = [" ".join(rng.choices(words.split(), k=12)) + f" {rng.randint(0, 999)}" for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_sentencepiece_ids_are_those_of_sentencepiece(pieces: Any) -> None:
    indices = range(pieces.get_piece_size())
    kinds = [
        6 if pieces.is_byte(i) else 2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 1
        for i in indices
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in indices],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in indices],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = read_tokenizer(Metadata("file", metadata)).tokenizer
    for text in ("the cache holds pages", "worker 123 wrote  twice", "naïve 漢字 👩", "tokens"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == pieces.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text).ids == [1, *ids]

"""Tokenizer and chat template out of a GGUF file's metadata, in the form that `tokenizers` saves.

Two kinds: byte-level BPE (`gpt2`, with a named pre-tokenizer) and SentencePiece BPE (`llama`).
Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import ModelError, UnsupportedModel
from .gguf_metadata import Metadata

# Values of tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before byte-level BPE: by a pattern, by GPT-2's own, or digits first."""

    pattern: str | None = None  # None: GPT-2's own pattern
    digits_first: bool = False
    whole_words_first: bool = False  # a word that is a token is not merged up to it
    normalise: bool = False  # to NFC


_GPT2 = _Split()
_DIGITS = _Split(digits_first=True)
_LLAMA3 = _Split(pattern=_CONTRACTIONS + r"|\p{N}{1,3}" + _TAIL, whole_words_first=True)
_QWEN2 = _Split(pattern=_CONTRACTIONS + r"|\p{N}" + _TAIL, normalise=True)
_SPLITS = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Split(pattern=_TEKKEN, whole_words_first=True),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a model folder needs besides weights. Ids that the file does not name are None."""

    tokenizer: Tokenizer
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    config: dict[str, Any]  # of tokenizer_config.json


def read_tokenizer(metadata: Metadata) -> GgufTokenizer:
    """Raises ModelError for broken metadata, UnsupportedModel for a kind that is not in this module."""
    kind = metadata.text("tokenizer.ggml.model")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ModelError("the GGUF file's token list holds the same token twice; the file is broken")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise UnsupportedModel(f"the GGUF file's tokenizer is of type {kind!r}; works: gpt2, llama")
    _add_special(tokenizer, metadata, tokens)
    named = _named_ids(metadata, len(tokens))
    add_bos = _adds_bos(metadata, kind)
    if add_bos and "bos" in named:
        bos = tokens[named["bos"]]
        # Pieces rather than a template string: a BOS text may hold the template's own marks.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["<bos>", "$A"], pair=None, special_tokens=[_special_piece(bos, named["bos"])]
        )
    template = metadata.text("tokenizer.chat_template", "") or None
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
    }
    config |= {f"{name}_token": tokens[index] for name, index in named.items() if name != "eot"}
    eos_ids = dict.fromkeys(named[name] for name in ("eos", "eot") if name in named)
    return GgufTokenizer(tokenizer, template, named.get("bos"), tuple(eos_ids), config)


def _special_piece(text: str, index: int) -> dict[str, Any]:
    return {"id": "<bos>", "ids": [index], "tokens": [text]}


def _named_ids(metadata: Metadata, num_tokens: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
    found: dict[str, int] = {}
    for name, word in keys.items():
        key = f"tokenizer.ggml.{word}_token_id"
        if key not in metadata:
            continue
        index = metadata.whole(key)
        if not 0 <= index < num_tokens:
            raise ModelError(f"the GGUF file's {key} is {index}, but there are {num_tokens} tokens")
        found[name] = index
    if "eos" not in found:
        raise ModelError("the GGUF file names no end-of-sequence token (tokenizer.ggml.eos_token_id)")
    return found


def _adds_bos(metadata: Metadata, kind: str) -> bool:
    by_kind = kind == "llama" or _SPLITS.get(metadata.text("tokenizer.ggml.pre", "")) is _LLAMA3
    return metadata.flag("tokenizer.ggml.add_bos_token", default=by_kind)


def _byte_level(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    name = metadata.text("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(name)
    if split is None:
        raise UnsupportedModel(
            f"the GGUF file's pre-tokenizer {name!r} is not known here; works: {', '.join(_SPLITS)}"
        )
    merges = [_pair(merge) for merge in metadata.texts("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=split.whole_words_first))
    if split.normalise:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.digits_first:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelError(f"the GGUF file's merge {merge[:40]!r} is not two tokens; the file is broken")
    return left, right


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {error}") from None


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """BPE with byte fallback; the merges are what the scores say, best score first."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(scores)} scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort(key=lambda item: item[:3])
    merges = [(left, right) for *_, left, right in ranked]
    unknown = tokens[metadata.whole("tokenizer.ggml.unknown_token_id", 0)]
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, **options))
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_special(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    types = metadata.numbers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    typed = list(zip(tokens, types, strict=True))
    control = [token for token, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    own = [token for token, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])

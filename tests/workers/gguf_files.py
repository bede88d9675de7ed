"""Writes small GGUF files for tests: the container, the block quantisations, a tiny llama."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, BF16 = 0, 1, 2, 3, 6, 8, 30
Floats = npt.NDArray[np.float32]


@dataclass
class GgufFile:
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[Floats, int]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        head += b"".join(_text(key) + _value(value) for key, value in self.metadata.items())
        data = b""
        for name, (values, kind) in self.tensors.items():
            shape = b"".join(struct.pack("<Q", size) for size in reversed(values.shape))
            head += _text(name) + struct.pack("<I", values.ndim) + shape
            head += struct.pack("<IQ", kind, len(data))
            data += encode_tensor(values, kind)
            data += b"\0" * (-len(data) % 32)
        path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
        return path


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    items = [_value(item) for item in value]
    kind = items[0][:4]
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def encode_tensor(values: Floats, kind: int) -> bytes:
    if kind == F32:
        return values.astype("<f4").tobytes()
    if kind == F16:
        return values.astype("<f2").tobytes()
    if kind == BF16:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return b"".join(_block(block, kind)[0] for block in values.reshape(-1, 32))


def rounded(values: Floats, kind: int) -> Floats:
    """What a reader of the encoded tensor must see."""
    if kind in (F32, F16, BF16):
        return values.astype(np.float16).astype(np.float32) if kind == F16 else values
    return np.concatenate([_block(block, kind)[1] for block in values.reshape(-1, 32)]).reshape(values.shape)


def _block(block: Floats, kind: int) -> tuple[bytes, Floats]:
    """One block of 32 values: its bytes, and the values that they stand for."""
    if kind == Q8_0:
        scale = np.float16(np.abs(block).max() / 127)
        codes = np.round(block / np.float32(scale)).astype(np.int8)
        return scale.tobytes() + codes.tobytes(), codes * np.float32(scale)
    if kind == Q5_0:
        return bytes(22), block
    low = np.float16(block.min())
    scale = np.float16((block.max() - np.float32(low)) / 15)
    if kind == Q4_0:
        scale = np.float16(np.abs(block).max() / 7)
        low = np.float16(-8 * scale)
    nibbles = np.clip(np.round((block - np.float32(low)) / np.float32(scale)), 0, 15).astype(np.uint8)
    packed = (nibbles[:16] | nibbles[16:] << 4).tobytes()
    head = scale.tobytes() if kind == Q4_0 else scale.tobytes() + low.tobytes()
    return head + packed, nibbles * np.float32(scale) + np.float32(low)


BYTES = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
BYTES += [chr(256 + index) for index in range(256 - len(BYTES))]
"""The 256 one-byte tokens of byte-level BPE."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_metadata() -> dict[str, Any]:
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "3 4", "12 34"]
    tokens = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}",
    }


def tiny_llama(kind: int = F32, *, seed: int = 0, layers: int = 2) -> GgufFile:
    """Hidden 64, 4 heads of 16 over 2 kv heads, ffn 96, tied embeddings; linear weights of one kind."""
    rng = np.random.default_rng(seed)
    metadata = tokenizer_metadata()
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    metadata |= {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.block_count": layers,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
        "llama.context_length": 512,
    }
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    file = GgufFile(metadata)

    def random(shape: tuple[int, ...]) -> Floats:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    file.tensors["token_embd.weight"] = (random((num_tokens, 64)), kind)
    file.tensors["output_norm.weight"] = (1 + random((64,)), F32)
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            file.tensors[f"blk.{layer}.{name}.weight"] = (1 + random((64,)), F32)
        for name, shape in shapes.items():
            file.tensors[f"blk.{layer}.{name}.weight"] = (random(shape), kind)
    return file

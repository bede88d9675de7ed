"""Small random models of the real architectures on disk, as a user's would be; mlx-lm is their reference."""

from __future__ import annotations

import copy
import importlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from kvcache.cache import Cache
from tests.fakes import byte_tokenizer
from tests.tiny_models import MIXED_FAMILIES, cast_mixed, draw_mixed, mixed_config
from workers import weights
from workers.engine import Engine
from workers.families import rope_overrides
from workers.grammar import GrammarLimits
from workers.messages import Sampling, Submit, Tokens
from workers.model import Loaded, load
from workers.pace import PaceLimits
from workers.process import grammars_of, rules_of
from workers.settings import EngineSettings

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def make_model(folder: Path, model_type: str, *, bits: int | None = None, **changes: Any) -> Path:
    """A model folder with seeded random weights, quantised to `bits` if given; `changes` go to its config.

    Models with experts or states are quantised as mlx-lm does it: their routers stay at 8 bits. For those,
    dtype="bfloat16" stores the weights as their makers do.
    """
    if model_type in MIXED_FAMILIES:
        _save_mixed(folder, model_type, bits, changes)
    else:
        _save_dense(folder, model_type, bits, changes)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def _save_dense(folder: Path, model_type: str, bits: int | None, changes: dict[str, Any]) -> None:
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        **changes,
    }
    module = importlib.import_module(f"mlx_lm.models.{_ARCHITECTURES[model_type]}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))


def _save_mixed(folder: Path, model_type: str, bits: int | None, changes: dict[str, Any]) -> None:
    config = mixed_config(model_type, changes)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    draw_mixed(model)
    if "dtype" in changes:
        cast_mixed(model, getattr(mx, changes["dtype"]))
    if bits is not None:
        model, config = quantize_model(model, config, group_size=64, bits=bits)
    save_model(folder, model)
    save_config(config, folder / "config.json")


class Reference:
    """mlx-lm's own generation of one prompt alone, without a cache from before."""

    def __init__(self, folder: Path, *, fp32: bool) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.model, _ = load_model(folder, model_config=rope_overrides(config))
        if fp32:
            weights.dequantise(self.model)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        steps = generate_step(mx.array(list(prompt)), self.model, max_tokens=num_tokens)
        return [int(token) for token, _ in steps]


class EngineUnderTest:
    """A real engine over a real model, without a bus."""

    def __init__(self, settings: EngineSettings, *, max_rows: int = 2048) -> None:
        self.loaded: Loaded = load(settings)
        self.cache = Cache(
            self.loaded.kv.num_pages,
            keep_prefixes=settings.kvcache.prefix_cache,
            num_states=self.loaded.ledger.num_states,
            num_small_states=self.loaded.ledger.num_small_states,
        )
        rules = rules_of(self.loaded, settings)
        limits = PaceLimits(min_rows=max_rows, min_idle_rows=max_rows, max_rows=max_rows)
        self.engine = Engine(
            self.loaded.runner,
            self.cache,
            rules,
            num_workers=settings.workers,
            limits=limits,
            grammars=grammars_of(rules, GrammarLimits()),
        )
        self.logprobs: list[float] = []  # that the turns of the last run were told, in order of events

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The tokens of several turns that start together; EOS does not end them."""
        return [tokens for tokens, _ in self.run(prompts, num_tokens)]

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sampling | None = None
    ) -> list[tuple[list[int], Any]]:
        """Tokens and terminal event of each turn."""
        for index, prompt in enumerate(prompts):
            self.engine.submit(
                Submit(
                    run_id=str(index),
                    attempt=1,
                    incarnation=1,
                    digest=self.loaded.digest,
                    token_ids=array("I", prompt).tobytes(),
                    max_tokens=num_tokens,
                    sampling=sampling or Sampling(temperature=0),
                    ignore_eos=True,
                )
            )
        tokens: list[list[int]] = [[] for _ in prompts]
        ends: dict[int, Any] = {}
        self.logprobs.clear()
        while self.engine.has_work:
            for told in self.engine.step():
                if isinstance(told.event, Tokens):
                    tokens[int(told.run_id)] += array("I", told.event.token_ids).tolist()
                    self.logprobs += [
                        top.logprob for one in told.event.logprobs for top in (one.chosen, *one.top)
                    ]
                elif hasattr(told.event, "usage"):
                    ends[int(told.run_id)] = told.event
        self.engine.check_integrity()
        return [(tokens[index], ends[index]) for index in range(len(prompts))]

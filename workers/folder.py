"""Checks a model folder before anything loads it: a broken one is named in one line. Imports no MLX."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from .architectures import text_config
from .errors import ModelError
from .families import check_config

_AGAIN = "download or convert the model again"


def check_folder(folder: Path) -> dict[str, Any]:
    """The folder's config, flat. Raises ModelError that names the broken, missing or truncated file."""
    config = read_config(folder)
    for name in _weight_files(folder):
        _check_safetensors(folder / name)
    read_json(folder / "tokenizer.json")
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The checked, flat config of a folder that may hold nothing else. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    config = text_config(read_json(folder / "config.json"))
    try:
        check_config(config)
    except ModelError as error:
        raise type(error)(f"{folder.name}: {error}") from None
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: missing; {_AGAIN}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{path}: broken or truncated ({error}); {_AGAIN}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object; {_AGAIN}")
    return value


def _weight_files(folder: Path) -> list[str]:
    """Names of the weight files; those that mlx-lm loads, and all that the index names."""
    names = {path.name for path in folder.glob("model*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: has no weight_map; {_AGAIN}")
        names |= {str(name) for name in weight_map.values()}
    if not names:
        raise ModelError(f"{folder}: no model*.safetensors in it; give an MLX or safetensors model folder")
    return sorted(names)


def _check_safetensors(path: Path) -> None:
    """The file is as long as its header says. Format: 8 bytes of little-endian length, JSON, data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            header: Any = json.loads(file.read(length)) if 0 < length <= size - 8 else None
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise ModelError(f"{path}: missing; {_AGAIN}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ModelError(f"{path}: broken or truncated header; {_AGAIN}") from None
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise ModelError(f"{path}: truncated: {size:,} of {expected:,} bytes; {_AGAIN}")

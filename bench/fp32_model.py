"""Writes an MLX model folder again with its weights in fp32, so that every server serves the same numbers.

    python -m bench.fp32_model SOURCE_FOLDER TARGET_FOLDER

Scales and biases are cast to fp32 before unpacking, as `tetrarch --weights fp32` does it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import sys
from pathlib import Path
from typing import Any


def unpacked(source: Path) -> dict[str, Any]:
    """All arrays of the folder by name, in fp32 and without scales and biases of quantisation."""
    import mlx.core as mx

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization") or {}
    arrays: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        loaded: Any = mx.load(str(file))
        arrays.update(loaded)
    target: dict[str, Any] = {}
    for name, array in arrays.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and f"{layer}.scales" in arrays:
            format_ = quantization.get(layer, quantization)
            target[name] = mx.dequantize(
                array,
                arrays[f"{layer}.scales"].astype(mx.float32),
                arrays[f"{layer}.biases"].astype(mx.float32),
                group_size=format_["group_size"],
                bits=format_["bits"],
            )
        elif not (kind in ("scales", "biases") and f"{layer}.weight" in arrays):
            target[name] = array.astype(mx.float32)
    return target


def main() -> None:
    """Convert the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL("libopenblas.so.0", ctypes.RTLD_GLOBAL)
    import mlx.core as mx

    options.target.mkdir(parents=True)
    for file in options.source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, options.target / file.name)
    config = json.loads((options.source / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if not name.startswith("quantization")}
    (options.target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=2))
    mx.save_safetensors(
        str(options.target / "model.safetensors"), unpacked(options.source), {"format": "mlx"}
    )


if __name__ == "__main__":
    main()

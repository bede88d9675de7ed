"""Writes an MLX model folder again with its weights in fp32, so that every server serves the same numbers.

    python -m bench.fp32_model SOURCE_FOLDER TARGET_FOLDER

The weights are those that `tetrarch --weights fp32` computes with.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from workers.machine import load_blas


def convert(source: Path, target: Path) -> None:
    """Raises what mlx-lm raises for a folder that it cannot load."""
    load_blas()
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    from workers.weights import dequantise

    model, _ = load_model(source, lazy=True)
    dequantise(model)
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if not name.startswith("quantization")}
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=2))
    mx.save_safetensors(
        str(target / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )


def main() -> None:
    """Convert the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    convert(options.source, options.target)


if __name__ == "__main__":
    main()

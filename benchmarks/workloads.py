"""Inputs that the benchmarks share: synthetic checkpoints, and the fields they ask for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

SPECTRAL = ("frob_norm", "stable_rank", "effective_rank", "nuclear_norm", "hard_rank", "esd_max", "esd_min")
ONE_PASS = (
    "frob_norm",
    "weights_std",
    "weights_mean",
    "weights_min",
    "weights_max",
    "weights_absmax",
    "zero_fraction",
    "nonfinite_fraction",
    "weights_kurtosis",
)


def matrices(count: int, rows: int, cols: int, seed: int = 0) -> Weights:
    """Return `count` matrices of standard normal float32."""
    rng = np.random.default_rng(seed)
    return {f"layer.{i}.weight": rng.standard_normal((rows, cols), np.float32) for i in range(count)}


def transformer(width: int, blocks: int, vocabulary: int, seed: int = 0) -> Weights:
    """Return the matrices of a small transformer encoder: an embedding, and six per block."""
    rng = np.random.default_rng(seed)
    shapes = {"embedding.weight": (vocabulary, width)}
    for block in range(blocks):
        shapes |= {f"block.{block}.attention.{x}.weight": (width, width) for x in ("query", "key", "value", "output")}
        shapes[f"block.{block}.up.weight"] = (4 * width, width)
        shapes[f"block.{block}.down.weight"] = (width, 4 * width)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_safetensors(path: Path, rows: int, cols: int, seed: int = 0, block: int = 4096) -> None:
    """Write one float32 matrix ``weight`` as safetensors, block by block."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [rows, cols], "data_offsets": [0, rows * cols * 4]}})
    text = header.encode().ljust((len(header) + 7) // 8 * 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, rows, block):
            file.write(rng.standard_normal((min(block, rows - first), cols), np.float32).tobytes())


def apparent_size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

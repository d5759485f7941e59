"""Large single runs: a matrix of gigabytes, and a sharded checkpoint with the shapes of a Llama.

``python -m benchmarks.large matrix`` or ``checkpoint``, with ``--scale`` for a smaller size. Each part runs in a
process of its own, so that peaks are its own; figures and the facts of the machine go into one JSON file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.peers import bare_numpy
from benchmarks.peers.ours import timed
from benchmarks.workloads import ONE_PASS, SPECTRAL, write_safetensors

ROOT = Path(__file__).resolve().parent.parent
MATRIX = (120_000, 4096)
WIDTH, BLOCKS, VOCABULARY = 2048, 42, 32_000
Figures = dict[str, Any]


def matrix_file(folder: Path, scale: float) -> Path:
    """Return the file of one float32 matrix, written if it is not there."""
    path = folder / "matrix.safetensors"
    if not path.exists():
        write_safetensors(path, *(max(8, int(side * scale)) for side in MATRIX))
    return path


def llama_shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Llama of reduced width: grouped queries, gated MLP, norms, untied head."""
    width, hidden = max(16, int(WIDTH * scale) // 16 * 16), max(16, int(WIDTH * scale) // 16 * 43)
    vocabulary, blocks = max(32, int(VOCABULARY * scale)), max(1, int(BLOCKS * min(1.0, 4 * scale)))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(blocks):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{x}_proj.weight": (width, width) for x in "qo"}
        shapes |= {f"{at}.self_attn.{x}_proj.weight": (width // 4, width) for x in "kv"}
        shapes |= {f"{at}.mlp.{x}_proj.weight": (hidden, width) for x in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (width, hidden)
        shapes |= {f"{at}.{x}_layernorm.weight": (width,) for x in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def checkpoint_folder(folder: Path, scale: float, shards: int = 4) -> Path:
    """Return a folder of float32 shards with an index, written if it is not there."""
    target = folder / "llama"
    if target.exists():
        return target
    target.mkdir()
    rng = np.random.default_rng(0)
    shapes = llama_shapes(scale)
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(np.array_split(np.array(names, object), shards), 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        header: dict[str, Any] = {}
        offset = 0
        for name in part:
            nbytes = 4 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (target / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in part:
                scaled = rng.standard_normal(shapes[name], np.float32)
                scaled *= shapes[name][-1] ** -0.5
                out.write(scaled.tobytes())
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf8")
    return target


def ours_matrix(folder: Path, scale: float) -> Figures:
    """Return the figures of the spectrum of the linked matrix, on threads."""
    return _applied(matrix_file(folder, scale), folder, ("weights_svals", "frob_norm"))


def cluster_matrix(folder: Path, scale: float) -> Figures:
    """Return the same on one worker with a limit of 1 GiB, and what it logged about memory."""
    from distributed import Client, LocalCluster

    limits: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 2, "memory_limit": "1GiB"}
    with LocalCluster(dashboard_address=None, **limits) as cluster, Client(cluster) as client:
        figures = _applied(matrix_file(folder, scale), folder, ("weights_svals", "frob_norm"))
        logs = [text for lines in client.get_worker_logs().values() for _, text in lines]
    return {**figures, "memory_messages": [text for text in logs if "memory" in text.lower()]}


def bare_matrix(folder: Path, scale: float) -> Figures:
    """Return the seconds of a plain loop over blocks of rows."""
    path = matrix_file(folder, scale)
    shape, offset = _header(path)
    return {"apply": bare_numpy.rows(path, offset, shape)}


def lapack_matrix(folder: Path, scale: float) -> Figures:
    """Return the seconds of LAPACK on the whole matrix in memory."""
    path = matrix_file(folder, scale)
    shape, offset = _header(path)
    start = time.perf_counter()
    whole = np.fromfile(path, "<f4", offset=offset).reshape(shape)
    np.linalg.svd(whole, compute_uv=False)
    return {"apply": time.perf_counter() - start}


def norms_checkpoint(folder: Path, scale: float) -> Figures:
    """Return the figures of the one-pass fields of the checkpoint."""
    return _applied(checkpoint_folder(folder, scale), folder, ONE_PASS)


def spectra_checkpoint(folder: Path, scale: float) -> Figures:
    """Return the figures of the spectral fields of the checkpoint."""
    return _applied(checkpoint_folder(folder, scale), folder, SPECTRAL)


def reading_checkpoint(folder: Path, scale: float) -> Figures:
    """Return the seconds of reading the files once."""
    start = time.perf_counter()
    for path in sorted(checkpoint_folder(folder, scale).glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
    return {"apply": time.perf_counter() - start}


def bare_checkpoint(folder: Path, scale: float) -> Figures:
    """Return the seconds of the same metrics in plain NumPy, on two threads with one BLAS thread each."""
    from diffract_dask.blas import blas_threads
    from diffract_dask.sources import open_checkpoint

    tensors = open_checkpoint(str(checkpoint_folder(folder, scale))).tensors
    arrays = [tensor.read(0, tensor.shape[0]) for tensor in tensors if len(tensor.shape) == 2]
    with blas_threads(1):
        return {"apply": bare_numpy.matrices(arrays)}


def _header(path: Path) -> tuple[tuple[int, int], int]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        rows, cols = json.loads(file.read(size))["weight"]["shape"]
    return (rows, cols), size + 8


def _applied(path: Path, folder: Path, fields: tuple[str, ...]) -> Figures:
    from diffract_dask import Session

    with tempfile.TemporaryDirectory(dir=folder) as scratch, Session(f"{scratch}/store.zarr") as session:
        link = timed(session.models.add, str(path), "model", link=True)
        plan = session.compute.plan(*fields)
        seconds = timed(session.compute.apply, *fields)
        return {"link": link, "apply": seconds, "projected": plan.peak_bytes, "explained": plan.explain()}


PARTS: dict[str, dict[str, Callable[[Path, float], Figures]]] = {
    "matrix": {"ours": ours_matrix, "cluster": cluster_matrix, "bare": bare_matrix, "lapack": lapack_matrix},
    "checkpoint": {
        "norms": norms_checkpoint,
        "spectra": spectra_checkpoint,
        "reading": reading_checkpoint,
        "bare": bare_checkpoint,
    },
}
FILES: dict[str, Callable[[Path, float], Path]] = {"matrix": matrix_file, "checkpoint": checkpoint_folder}


def main(argv: list[str] | None = None) -> int:
    """Run one subject, each part in a process of its own, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=sorted(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="of each side; 1 is gigabytes (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, help="where files lie and stay (default: a temporary folder)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.part:
        figures = PARTS[args.subject][args.part](args.scratch, args.scale)
        print(json.dumps({**figures, "peak": machine.peak_memory()}))
        return 0
    facts = machine.facts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.scratch or Path(temporary)
        FILES[args.subject](folder, args.scale)
        found = {name: _measured(args.subject, name, folder, args.scale) for name in PARTS[args.subject]}
    for name, figures in found.items():
        link = f", link {figures['link']:.2f} s" if "link" in figures else ""
        projected = f" (tasks: {figures['projected'] / 2**20:.0f} projected)" if "projected" in figures else ""
        print(f"{name:8} {figures['apply']:8.2f} s, peak {figures['peak'] / 2**20:6.0f} MiB{projected}{link}")
    out = args.out or ROOT / "benchmarks/results" / f"large_{args.subject}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": facts, "scale": args.scale, "parts": found}, indent=1), encoding="utf8")
    return 0


def _measured(subject: str, part: str, folder: Path, scale: float) -> Figures:
    command = [sys.executable, "-m", "benchmarks.large", subject, "--part", part]
    command += ["--scale", str(scale), "--scratch", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())

"""Run this package, its peers and bare NumPy in one sitting and print each figure beside the bar it has to meet.

``make peers``, or ``python -m benchmarks.peers.side_by_side [--only BAR] [--envs FOLDER] [--out FILE]``. Every
measurement is a process of its own, so that peak memory (VmHWM) is that of the work measured and nothing else. Times
are the best of several; the load of the machine is noted beside them, for other processes spoil all of these figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.fetch_real_weights import folder as real_weights
from benchmarks.peers import bare_numpy, environments, ours
from benchmarks.workloads import Weights, matrices, write_safetensors

ROOT = Path(__file__).resolve().parent.parent.parent
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are; the tests run them tiny."""

    squares: tuple[int, int] = (300, 384)
    tiny: tuple[int, int] = (20000, 16)
    fleet: tuple[int, int] = (200, 100)
    adds: tuple[int, int] = (1000, 100)
    shapes: tuple[int, int] = (20000, 200)
    large: tuple[int, int] = (60000, 4096)
    repeats: int = 7


TINY = Sizes((6, 12), (50, 4), (3, 4), (16, 3), (30, 3), (300, 20), 1)


@dataclass(frozen=True)
class Row:
    """One figure and its bar."""

    bar: str
    figure: float
    limit: float
    unit: str
    detail: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure meets the bar."""
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


@dataclass
class Sitting:
    """Where a run keeps its files and what it has measured."""

    scratch: Path
    envs: Path
    sizes: Sizes
    checkpoint: Path
    tiny: bool = False
    measured: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def part(self, name: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
        """Return the figures of one part, measured in a new process; once per sitting."""
        if name not in self.measured:
            command = [sys.executable, "-m", "benchmarks.peers.side_by_side", "--part", name]
            command += ["--scratch", str(self.scratch), "--checkpoint", str(self.checkpoint)]
            load = machine.load()
            text = _output([*command, *(["--tiny"] if self.tiny else [])], environment)
            self.measured[name] = {**json.loads(text), "load_before": load}
        found: dict[str, Any] = self.measured[name]
        return found

    def peer(self, name: str, script: str) -> dict[str, Any] | None:
        """Return the figures of another tool on the checkpoint; None, and a word why, where it cannot run."""
        if name not in self.measured:
            python, reason = environments.python_of(name, self.envs)
            if python is None:
                self.left_out[name] = reason
                return None
            repeats = "5" if not self.tiny else "1"
            load = machine.load()
            text = _output([python, str(Path(__file__).parent / script), str(self.checkpoint), repeats])
            self.measured[name] = {**json.loads(text), "load_before": load}
        found: dict[str, Any] = self.measured[name]
        return found


def _output(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        timeout=1800,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout.strip().splitlines()[-1]


# What runs in a process of its own: name -> function of the sitting.


def _checkpoint_arrays(sitting: Sitting) -> list[Any]:
    from diffract_dask.sources import open_checkpoint

    tensors = open_checkpoint(str(sitting.checkpoint)).tensors
    return [t.read(0, t.shape[0]) for t in tensors if len(t.shape) == 2 and t.dtype == "float32"]


def _repeat(repeats: int, call: Callable[..., float], *args: Any) -> dict[str, Any]:
    return {"seconds": [call(*args) for _ in range(repeats)]}


def _squares(sitting: Sitting) -> Weights:
    count, k = sitting.sizes.squares
    return matrices(count, k, k)


def _tiny_slices(sitting: Sitting) -> Weights:
    count, k = sitting.sizes.tiny
    return matrices(count, k, k)


def _bare_batch(sitting: Sitting) -> dict[str, Any]:
    import numpy as np

    stacked = np.stack(list(_tiny_slices(sitting).values()))
    return _repeat(sitting.sizes.repeats, bare_numpy.batch, stacked)


def _large_file(sitting: Sitting) -> tuple[Path, int]:
    path = sitting.scratch / "large.safetensors"
    if not path.exists():
        write_safetensors(path, *sitting.sizes.large)
    with path.open("rb") as file:
        return path, int.from_bytes(file.read(8), "little") + 8


def _bare_rows(sitting: Sitting) -> dict[str, Any]:
    path, offset = _large_file(sitting)
    return _repeat(1, bare_numpy.rows, path, offset, sitting.sizes.large)


def _fleet_path(sitting: Sitting) -> Path:
    return sitting.scratch / "fleet.zarr"


def _make_fleet(sitting: Sitting) -> dict[str, Any]:
    return _repeat(1, ours.timed, ours.make_fleet, _fleet_path(sitting), *sitting.sizes.fleet)


PARTS: dict[str, Callable[[Sitting], dict[str, Any]]] = {
    "bare-checkpoint": lambda s: _repeat(s.sizes.repeats, bare_numpy.matrices, _checkpoint_arrays(s)),
    "checkpoint": lambda s: ours.checkpoint(s.checkpoint, s.scratch, s.sizes.repeats),
    "bare-norms": lambda s: _repeat(s.sizes.repeats, bare_numpy.frobenius, _checkpoint_arrays(s)),
    "one-pass": lambda s: ours.one_pass(
        {f"w{i}": w for i, w in enumerate(_checkpoint_arrays(s))}, s.scratch, s.sizes.repeats
    ),
    "bare-squares": lambda s: _repeat(3, bare_numpy.matrices, list(_squares(s).values())),
    "squares": lambda s: ours.many(_squares(s), s.scratch),
    "squares-cluster": lambda s: ours.many(_squares(s), s.scratch, processes=2),
    "bare-tiny": _bare_batch,
    "tiny": lambda s: ours.many(_tiny_slices(s), s.scratch),
    "overhead": lambda s: ours.overhead(s.scratch, *s.sizes.shapes),
    "make-fleet": _make_fleet,
    "fleet": lambda s: ours.fleet(_fleet_path(s)),
    "adding": lambda s: ours.adding(s.scratch, *s.sizes.adds),
    "bare-large": _bare_rows,
    "large": lambda s: ours.large(_large_file(s)[0], s.scratch),
}


# Bars: what each figure must be.


def bar_checkpoint(sitting: Sitting) -> list[Row]:
    """A transformer's spectra, linked, results stored."""
    bare = min(sitting.part("bare-checkpoint", ONE_BLAS_THREAD)["seconds"])
    mine = sitting.part("checkpoint")
    best = min(mine["apply"])
    size = sitting.checkpoint.stat().st_size
    rows = [
        Row("spectra of a linked checkpoint / bare NumPy", best / bare, 1.9, "×", f"{best:.3f} s / {bare:.3f} s"),
        Row("add it by link", min(mine["link"]), 0.2, "s"),
        Row("add it by copy", mine["copy_mb_s"], 300, "MB/s", at_least=True),
        Row(
            "its results on disk",
            mine["results"] / (0.05 * size + 64e3),
            1.0,
            "× (5 % + 64 kB)",
            f"{mine['results'] / 1e3:.0f} kB",
        ),
    ]
    diffract = sitting.peer("diffract", "diffract_minilm.py")
    if diffract is not None:
        other = min(diffract["seconds"])
        detail = f"{other:.2f} s / {best:.3f} s"
        rows.append(Row("diffract-core 0.3.1 / this", other / best, 6, "×", detail, at_least=True))
    watcher = sitting.peer("weightwatcher", "weightwatcher_minilm.py")
    if watcher is not None:
        other = min(watcher["seconds"])
        detail = f"{other:.2f} s / {best:.3f} s; its own metrics, power-law fits among them; no bar"
        rows.append(Row("weightwatcher 0.7.7 / this", other / best, 0, "×", detail, at_least=True))
    return rows


def bar_one_pass(sitting: Sitting) -> list[Row]:
    """All fields that need one pass over the weights, against one norm."""
    bare = min(sitting.part("bare-norms", ONE_BLAS_THREAD)["seconds"])
    mine = sitting.part("one-pass")
    return [
        Row(f"one-pass fields, {what} / np.linalg.norm", t / bare, 15, "×", f"{t * 1e3:.1f} ms / {bare * 1e3:.1f} ms")
        for what, t in (("compute.apply", min(mine["apply"])), ("moments alone", min(mine["moments"])))
    ]


def bar_squares(sitting: Sitting) -> list[Row]:
    """Many slices of one shape, on threads and on a cluster of two processes."""
    bare = min(sitting.part("bare-squares", ONE_BLAS_THREAD)["seconds"])
    count, k = sitting.sizes.squares
    rows = []
    for name, where, limit in (("squares", "threads", 1.15), ("squares-cluster", "two processes", 1.6)):
        best = min(sitting.part(name)["apply"])
        detail = f"{best:.3f} s / {bare:.3f} s"
        rows.append(Row(f"{count} slices of {k}², {where} / bare NumPy", best / bare, limit, "×", detail))
    return rows


def bar_tiny(sitting: Sitting) -> list[Row]:
    """Slices so small that the engine's own cost shows."""
    bare = min(sitting.part("bare-tiny", ONE_BLAS_THREAD)["seconds"])
    mine, engine = sitting.part("tiny"), sitting.part("overhead")
    count, k = sitting.sizes.tiny
    best = min(mine["apply"])
    build = min(engine["build"]) / engine["kernel_blocks"]
    each = engine["apply"] / engine["kernel_blocks"]
    detail = f"{best:.2f} s, bare NumPy {bare:.2f} s"
    tasks = f"{engine['kernel_blocks']} of them, {engine['apply']:.2f} s; planned in {engine['plan']:.2f} s"
    return [
        Row(f"{count} slices of {k}², per slice", best / count * 1e3, 0.1, "ms", detail),
        Row("{} slices in {} shapes, per kernel × block".format(*sitting.sizes.shapes), each * 1e3, 1.0, "ms", tasks),
        Row("building the graph, per kernel × block", build * 1e6, 20, "µs"),
    ]


def bar_fleet(sitting: Sitting) -> list[Row]:
    """A store with many models in which everything is computed, and adding to one."""
    if not _fleet_path(sitting).exists():
        sitting.part("make-fleet")
    mine, adding = sitting.part("fleet"), sitting.part("adding")
    models, names = sitting.sizes.fleet
    size = sum(w.stat().st_size for w in _fleet_path(sitting).glob("models/*/weights/**/*") if w.is_file())
    early, late = adding["early"] * 1e3, adding["late"] * 1e3
    return [
        Row(f"{models} models × {names} names × 30 fields: nothing to do", min(mine["nothing_to_do"]), 0.3, "s"),
        Row("the same: open and load", min(mine["load"]), 0.3, "s"),
        Row("the same: view rebuilt", min(mine["rebuild"]), 2.5, "s"),
        Row(
            "the same: results on disk",
            mine["results"] / (0.05 * size + 64e3 * models),
            1.0,
            "× (5 % + 64 kB a model)",
            f"{mine['results'] / 1e3 / models:.0f} kB a model, weights {size / 1e3 / models:.0f} kB",
        ),
        Row(f"adding a model of {sitting.sizes.adds[1]} names", early, 80, "ms"),
        Row(f"the same at {sitting.sizes.adds[0]} models", late, 80, "ms"),
        Row("late / early", late / early, 1.15, "×", "“no slower”, with the noise of a median of ten"),
    ]


def bar_large(sitting: Sitting) -> list[Row]:
    """One matrix of a gigabyte, linked: time, and peak memory."""
    _large_file(sitting)
    bare = sitting.part("bare-large")
    mine = sitting.part("large")
    m, n = sitting.sizes.large
    seconds = bare["seconds"][0]
    gib = mine["peak"] / 2**30
    detail = f"{mine['apply']:.1f} s / {seconds:.1f} s (two BLAS threads, peak {bare['peak'] / 2**30:.2f} GiB)"
    return [
        Row(f"spectrum of {m} × {n} from a file / bare NumPy", mine["apply"] / seconds, 1.0, "×", detail),
        Row("its peak memory", gib, 0.6, "GiB", f"projected {mine['projected'] / 2**30:.2f} GiB in tasks"),
    ]


BARS: dict[str, Callable[[Sitting], list[Row]]] = {
    "checkpoint": bar_checkpoint,
    "one-pass": bar_one_pass,
    "squares": bar_squares,
    "tiny": bar_tiny,
    "fleet": bar_fleet,
    "large": bar_large,
}


def show(rows: list[Row]) -> str:
    """Return the figures as a table."""
    lines = []
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        bar = f"{sign} {row.limit:g}" if row.limit else "–"
        word = "met" if row.met else "MISSED"
        lines.append(f"{row.bar:62} {row.figure:9.3g} {row.unit:24} {bar:8} {word if row.limit else '':7} {row.detail}")
    return "\n".join(line.rstrip() for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Run all bars, or one; with ``--part`` measure one part in this process and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(BARS), action="append", help="this bar alone (may be repeated)")
    parser.add_argument("--envs", type=Path, default=ROOT / ".bench-envs", help="where the peers are installed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/side_by_side.json")
    parser.add_argument("--checkpoint", type=Path, default=real_weights() / "minilm" / "model.safetensors")
    parser.add_argument("--scratch", type=Path, help="folder for stores and files (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="tiny workloads: does it run at all?")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = TINY if args.tiny else Sizes()
    if args.part:
        figures = PARTS[args.part](Sitting(args.scratch, args.envs, sizes, args.checkpoint, args.tiny))
        print(json.dumps({**figures, "peak": machine.peak_memory()}))
        return 0
    facts = machine.facts()
    print(json.dumps(facts, indent=1, ensure_ascii=False))
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        sitting = Sitting(Path(scratch), args.envs, sizes, args.checkpoint, args.tiny)
        rows: list[Row] = []
        for name in args.only or BARS:
            if name in ("checkpoint", "one-pass") and not args.checkpoint.is_file():
                sitting.left_out[name] = f"no {args.checkpoint}; `make real-weights` fetches it"
                continue
            found = BARS[name](sitting)
            print(f"\n{name} (load {machine.load()})\n{show(found)}", flush=True)
            rows += found
    for name, reason in sitting.left_out.items():
        print(f"left out: {name}: {reason}")
    missed = [row.bar for row in rows if not row.met]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} met" + "".join(f"\n  missed: {bar}" for bar in missed))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": facts, "rows": [{**asdict(r), "met": r.met} for r in rows], "measured": sitting.measured}
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the asv classes of ``bench_*.py`` without asv: ``make bench``, or ``python -m benchmarks.run [PATTERN …]``.

Each ``time_*`` is repeated for about a second and the best time is kept; each ``peakmem_*`` runs in a process of its
own. Prints a line per benchmark and writes one JSON file with the facts of the machine beside the figures.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine

FOLDER = Path(__file__).resolve().parent
KINDS = ("time_", "peakmem_")


@dataclass(frozen=True)
class Case:
    """One benchmark with one choice of parameters."""

    module: str
    cls: str
    method: str
    index: int
    params: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Name with parameters, as asv writes it."""
        return f"{self.module}.{self.cls}.{self.method}({', '.join(map(repr, self.params))})"

    def instance(self) -> Any:
        """Return an object of the class, not set up."""
        return getattr(importlib.import_module(f"benchmarks.{self.module}"), self.cls)()


def cases(*, tiny: bool = False) -> Iterator[Case]:
    """Yield every benchmark for every combination of its class's `params`, or of `tiny`, which a test uses."""
    for path in sorted(FOLDER.glob("bench_*.py")):
        module = importlib.import_module(f"benchmarks.{path.stem}")
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ != module.__name__:
                continue
            choices = list(itertools.product(*(cls.tiny if tiny else cls.params)))
            for method in (m for m in vars(cls) if m.startswith(KINDS)):
                yield from (Case(path.stem, name, method, i, params) for i, params in enumerate(choices))


def run_once(case: Case) -> float:
    """Set up, run the benchmark once and tear down; return the seconds of the run alone."""
    instance = case.instance()
    instance.setup(*case.params)
    try:
        start = time.perf_counter()
        getattr(instance, case.method)(*case.params)
        return time.perf_counter() - start
    finally:
        getattr(instance, "teardown", lambda *params: None)(*case.params)


def best_time(case: Case, budget: float) -> tuple[float, int]:
    """Return the best time of several runs, and how many there were; with ``number = 1`` each is set up anew."""
    seconds = [run_once(case)]  # the first one pays for imports and is kept only if it is the best
    deadline = time.perf_counter() + budget
    if getattr(case.instance(), "number", 0) == 1:
        while time.perf_counter() < deadline or len(seconds) < 3:
            seconds.append(run_once(case))
        return min(seconds), len(seconds)
    instance = case.instance()
    instance.setup(*case.params)
    try:
        while time.perf_counter() < deadline or len(seconds) < 3:
            start = time.perf_counter()
            getattr(instance, case.method)(*case.params)
            seconds.append(time.perf_counter() - start)
    finally:
        getattr(instance, "teardown", lambda *params: None)(*case.params)
    return min(seconds), len(seconds)


def peak_of(case: Case) -> int:
    """Return the peak memory in bytes of a new process that runs one benchmark once, set-up included."""
    command = [sys.executable, "-m", "benchmarks.run", "--peak", f"{case.module}.{case.cls}.{case.method}:{case.index}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    if done.returncode:
        raise RuntimeError(f"{case.name} failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def measure(case: Case, budget: float) -> dict[str, Any]:
    """Return one result: name, value, unit, number of runs."""
    if case.method.startswith("time_"):
        value, runs = best_time(case, budget)
        return {"name": case.name, "value": value, "unit": "s", "runs": runs}
    return {"name": case.name, "value": peak_of(case), "unit": "bytes", "runs": 1}


def main(argv: list[str] | None = None) -> int:
    """Run what matches any of the patterns, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="run benchmarks whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="to repeat each for (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "bench.json")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peak:
        wanted, _, index = args.peak.rpartition(":")
        for case in cases():
            if f"{case.module}.{case.cls}.{case.method}" == wanted and case.index == int(index):
                run_once(case)
                print(machine.peak_memory())
        return 0
    facts = machine.facts()
    print(json.dumps(facts, indent=1, ensure_ascii=False))
    results = []
    for case in cases():
        if args.patterns and not any(pattern in case.name for pattern in args.patterns):
            continue
        result = measure(case, args.seconds)
        results.append(result)
        shown = (
            f"{result['value'] * 1e3:12.3f} ms " if result["unit"] == "s" else f"{result['value'] / 2**20:12.1f} MiB"
        )
        print(f"{shown} {case.name}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": facts, "results": results}, indent=1), encoding="utf8")
    print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

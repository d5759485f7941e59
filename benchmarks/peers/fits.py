"""Our fits beside those of `powerlaw`: the same samples, in one sitting, with the same results.

``python -m benchmarks.peers.fits [--envs FOLDER] [--out FILE] [--tiny]``. Power laws are compared with powerlaw 2.0
(in the environment of weightwatcher), truncated ones with 1.5 (in that of diffract), since 2.0 fails on them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.peers import environments
from diffract_dask.powerlaw import bootstrap_p_value, fit

ROOT = Path(__file__).resolve().parent.parent.parent
PEER = {"power_law": "weightwatcher", "truncated_power_law": "diffract"}
LIMITS = {("power_law", 100_000): 1.0, ("power_law", 1_000_000): 5.0, ("truncated_power_law", 4096): 1.0}
REPEATS = 5


def sample(n: int) -> NDArray[np.float64]:
    """Return `n` values of a power law of exponent 2.5."""
    return np.random.default_rng(0).pareto(1.5, n) + 1


def ours(values: NDArray[np.float64], family: str) -> dict[str, Any]:
    """Return the best time of several fits and what they found."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        found = fit(values, family)
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "xmin": found.xmin, "alpha": found.alpha, "ks": found.ks}


def theirs(values: NDArray[np.float64], family: str, envs: Path) -> dict[str, Any]:
    """Return the time of one fit by `powerlaw` and what it found, or the reason why there is none."""
    python, reason = environments.python_of(PEER[family], envs)
    if python is None:
        return {"left_out": reason}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "values.npy"
        np.save(path, values)
        command = [python, str(ROOT / "benchmarks" / "peers" / "powerlaw_fits.py"), str(path), family]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"left_out": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def beside(family: str, n: int, envs: Path) -> dict[str, Any]:
    """Return one comparison: both results, how many times faster ours is, how far the results are apart."""
    values = sample(n)
    row: dict[str, Any] = {"family": family, "n": n, "ours": ours(values, family), "peer": theirs(values, family, envs)}
    if "seconds" in row["peer"]:
        row["faster"] = row["peer"]["seconds"] / row["ours"]["seconds"]
        row["apart"] = {key: abs(row["ours"][key] / row["peer"][key] - 1) for key in ("xmin", "alpha", "ks")}
    return row


def alone(tiny: bool) -> list[dict[str, Any]]:
    """Return our times where there is a limit but no peer."""
    rows = []
    for (family, n), limit in LIMITS.items():
        size = 200 if tiny else n
        rows.append({"what": f"{family} of {size}", "seconds": ours(sample(size), family)["seconds"], "limit": limit})
    for family in ("power_law", "truncated_power_law"):
        found = fit(sample(60 if tiny else 1000), family, xmin=1.0)
        start = time.perf_counter()
        bootstrap_p_value(found)
        seconds = time.perf_counter() - start
        rows.append({"what": f"2500 replicas, {family} of {found.n_tail}", "seconds": seconds, "limit": 1.0})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print each comparison and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, default=ROOT / ".bench-envs", help="of the peers (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "fits.json")
    parser.add_argument("--tiny", action="store_true", help="small samples and no peers: only to see that it runs")
    args = parser.parse_args(argv)
    rows = alone(args.tiny)
    for row in rows:
        print(f"{row['seconds'] * 1e3:10.1f} ms (limit {row['limit'] * 1e3:.0f})  {row['what']}", flush=True)
    compared = []
    for family, n in () if args.tiny else (("power_law", 20_000), ("truncated_power_law", 400)):
        row = beside(family, n, args.envs)
        compared.append(row)
        print(json.dumps(row, indent=1), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine.facts(), "alone": rows, "beside": compared}, indent=1)
    args.out.write_text(text, encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

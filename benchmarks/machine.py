"""Facts about the machine that a figure was measured on, and what a process used of it."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("diffract_dask", "dask", "distributed", "numpy", "scipy", "xarray", "zarr")
THREAD_SETTINGS = re.compile(r"(OPENBLAS|OMP|MKL|BLIS|DASK|DIFFRACT_DASK)_")


def facts() -> dict[str, Any]:
    """Return processor, cores, memory, versions, BLAS, and the environment variables that steer threads."""
    import numpy  # noqa: F401  (loads its BLAS, so that it is listed)
    import scipy.linalg  # noqa: F401
    from threadpoolctl import threadpool_info

    return {
        "cpu": _first(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(_first(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)") or 0) / 2**20, 1),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in PACKAGES},
        "blas": [
            {key: pool.get(key) for key in ("internal_api", "version", "architecture", "num_threads")}
            for pool in threadpool_info()
        ],
        "environment": {key: value for key, value in sorted(os.environ.items()) if THREAD_SETTINGS.match(key)},
        "load": load(),
    }


def load() -> float:
    """Return the load average of the last minute; NaN where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else float("nan")


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes (0 where it is not known)."""
    found = _first(Path("/proc/self/status"), r"VmHWM:\s*(\d+) kB")
    return int(found) * 1024 if found else 0


def _first(path: Path, pattern: str) -> str | None:
    if not path.is_file():
        return None
    match = re.search(pattern, path.read_text(encoding="utf8"))
    return match[1].strip() if match else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

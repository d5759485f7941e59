"""Where tasks will run, and in how much memory: this process's threads, or an active client's workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffract_dask import config

__all__ = ["Resources", "active_client", "available_bytes", "resources", "show"]


@dataclass(frozen=True)
class Resources:
    """Where tasks will run.

    Attributes
    ----------
    workers : int
        Tasks that run at once.
    processes : int
        Processes that they are spread over.
    budget : int
        Bytes that all tasks may use at once.
    distributed : bool
        A :class:`distributed.Client` is active.
    """

    workers: int
    processes: int
    budget: int
    distributed: bool

    @property
    def per_process(self) -> int:
        """Bytes that the tasks of one process may use."""
        return self.budget // self.processes


def show(nbytes: float) -> str:
    """Return bytes for people.

    >>> show(3 * 2**20)
    '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    raise AssertionError


def available_bytes() -> int:
    """Return the memory that this process may still take: what is free, or the control group's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as handle:
                text = handle.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(free, int(text))
    return free


def resources(settings: Mapping[str, Any] | None = None) -> Resources:
    """Return the active distributed client's workers, or this process's threads, with the memory budget."""
    wanted = config.get("memory-budget", settings)
    client = active_client()
    if client is not None:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        threads = sum(int(worker["nthreads"]) for worker in workers)
        limits = [int(worker["memory_limit"]) for worker in workers if worker.get("memory_limit")]
        processes = max(1, len(workers))
        limit = min(limits) * processes if limits else available_bytes()
        budget = config.parse_size(wanted) if wanted is not None else int(0.6 * limit)
        return Resources(max(1, threads), processes, budget, True)
    count = config.number("threads", settings) or _cores()
    budget = config.parse_size(wanted) if wanted is not None else int(0.6 * available_bytes())
    return Resources(int(count), 1, budget, False)


def active_client() -> Any | None:
    """Return the active :class:`distributed.Client`, or None; never imports distributed."""
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        return default_client()  # type: ignore[no-untyped-call]
    except ValueError:
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

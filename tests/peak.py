"""Peak memory of a piece of code, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

__all__ = ["peak_of"]

_PROGRAM = """
import sys
import dask
from diffract_dask import Session

dask.config.set({{"diffract_dask.threads": 2}})

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

{before}
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
resident = status("VmRSS")
{measured}
print("\\npeak", status("VmHWM") - resident)
"""


def peak_of(before: str, measured: str, *arguments: Any) -> tuple[int, str]:
    """Return by how many bytes resident memory rises at most while `measured` runs, and what it prints.

    Parameters
    ----------
    before, measured : str
        Python code; `before` runs first, and may make what `measured` uses. ``Session``, ``dask`` and ``sys`` are
        imported, and Dask has two threads.
    *arguments
        As text in ``sys.argv[1:]``.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("peak memory is read from /proc")
    program = _PROGRAM.format(before=before, measured=measured)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, _, peak = done.stdout.rpartition("\npeak ")
    return int(peak), printed

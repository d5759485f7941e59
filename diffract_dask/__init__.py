"""Out-of-core, xarray-native spectral analysis of neural-network weights.

>>> import numpy as np
>>> from diffract_dask import Session
>>> session = Session()
>>> session.models.add({"fc.weight": np.eye(4, 3)}, model_id="m")
'm'
>>> session.compute.apply("stable_rank").computed["stable_rank"]
1

Importing the package is quick: names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffract_dask.fields import Field, Status
    from diffract_dask.kernel import Kernel
    from diffract_dask.session import Session, list_profiles
    from diffract_dask.store import upgrade

__version__ = "0.1.0"

__all__ = ["Field", "Kernel", "Session", "Status", "__version__", "list_profiles", "upgrade"]

_HOME = {
    "Field": "fields",
    "Kernel": "kernel",
    "Session": "session",
    "Status": "fields",
    "list_profiles": "session",
    "upgrade": "store",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

"""Settings: read through :mod:`dask.config` under ``diffract_dask``.

Defaults come with the package (``diffract_dask.yaml``); they are overridden by Dask's configuration files, by
environment variables (``DASK_DIFFRACT_DASK__MEMORY_BUDGET=2GiB``), by ``dask.config.set`` and by
``Session(config_path=…)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from diffract_dask.errors import ConfigurationError, did_you_mean

__all__ = ["defaults", "get", "load", "number", "parse_size"]


@cache
def defaults() -> dict[str, Any]:
    """Return the settings that the package ships with, by name."""
    import yaml

    text = files("diffract_dask").joinpath("diffract_dask.yaml").read_text(encoding="utf8")
    loaded: dict[str, Any] = yaml.safe_load(text)["diffract_dask"]
    return loaded


def get(name: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """Return the setting `name`: from `overrides` if there, else from Dask's configuration, else the default.

    Raises
    ------
    ConfigurationError
        No setting has this name.
    """
    known = defaults()
    if name not in known:
        raise ConfigurationError(f"no setting {name!r}.{did_you_mean(name, known)}")
    if overrides is not None and name in overrides:
        return overrides[name]
    import dask.config

    return dask.config.get(f"diffract_dask.{name}", known[name])


def number(name: str, overrides: Mapping[str, Any] | None = None) -> float:
    """Return the setting `name` as a number that is not negative; 0 if it is null.

    Raises
    ------
    ConfigurationError
        It is no such number.
    """
    value = get(name, overrides)
    try:
        found = 0.0 if value is None else float(value)
    except (TypeError, ValueError):
        found = -1.0
    if not found >= 0:
        raise ConfigurationError(f"the setting {name!r} is {value!r}; give a number that is not negative")
    return found


def load(path: str | Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file, checked against the known names.

    The file holds the settings themselves or a mapping ``diffract_dask:`` of them.

    Raises
    ------
    ConfigurationError
        The file is missing, is not a mapping, or names an unknown setting.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        raise ConfigurationError(f"configuration file {str(path)!r} does not exist; give an existing file or a profile")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"configuration file {str(path)!r} is not YAML or JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"configuration file {str(path)!r} holds a {type(content).__name__}, not a mapping")
    content = content.get("diffract_dask", content)
    settings = {str(key).replace("_", "-"): value for key, value in content.items()}
    for key in settings:
        if key not in defaults():
            raise ConfigurationError(
                f"configuration file {str(path)!r}: no setting {key!r}.{did_you_mean(key, defaults())}"
            )
    return settings


def parse_size(value: str | int | float) -> int:
    """Return a number of bytes from ``"64 MiB"``, ``"2GB"`` or a number.

    >>> parse_size("64 MiB")
    67108864
    """
    from dask.utils import parse_bytes

    try:
        size = int(parse_bytes(value))
    except (TypeError, ValueError, AttributeError):
        size = -1
    if size < 0:
        raise ConfigurationError(f"{value!r} is not a size; write for example '512 MiB'")
    return size

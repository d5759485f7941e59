"""Checks of the numbers that a caller sets, so that a wrong one is named where it is given."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from diffract_dask.errors import ConfigurationError

__all__ = ["check_number", "check_whole"]

_LARGEST = 2**53


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ConfigurationError unless `value` is a whole number from `least` to 2**53; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= _LARGEST:
        raise ConfigurationError(f"{name} is {value!r}; it must be a whole number from {least} to 2**53")


def check_number(name: str, value: Any, allowed: Callable[[Any], bool], meaning: str) -> None:
    """Raise ConfigurationError unless `value` is a number that is `allowed`; `meaning` says which are."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not allowed(value):
        raise ConfigurationError(f"{name} is {value!r}; it must be {meaning}")

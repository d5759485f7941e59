"""Selections of models and parameters: exact, glob (``*``, ``?``, ``[…]``) or ``re:`` regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import PARAMETER_TYPES, uid
from diffract_dask.errors import FilterError, did_you_mean

if TYPE_CHECKING:
    from diffract_dask.view import View

__all__ = ["Selection", "is_pattern", "matches"]

Patterns = str | Iterable[str] | None


@dataclass(frozen=True)
class Selection:
    """Conditions that all must hold; None is no condition, an empty tuple selects nothing."""

    model_ids: tuple[str, ...] | None = None
    param_names: tuple[str, ...] | None = None
    param_types: tuple[str, ...] | None = None
    param_ids: tuple[str, ...] | None = None
    within: Selection | None = None

    @classmethod
    def of(
        cls,
        model_ids: Patterns = None,
        param_names: Patterns = None,
        param_types: Patterns = None,
        param_ids: Patterns = None,
        within: Selection | None = None,
    ) -> Selection:
        """Return a selection from what users pass: one pattern or several; FilterError if one is malformed."""
        chosen = [_tuple(patterns) for patterns in (model_ids, param_names, param_types, param_ids)]
        for patterns in chosen:
            for pattern in patterns or ():
                _compiled(pattern)
        for name in chosen[2] or ():
            if not is_pattern(name) and name not in PARAMETER_TYPES:
                raise FilterError(
                    f"no parameter type {name!r}; the types are {', '.join(PARAMETER_TYPES)}."
                    f"{did_you_mean(name, PARAMETER_TYPES)}"
                )
        return cls(chosen[0], chosen[1], chosen[2], chosen[3], within)

    @property
    def whole_models(self) -> bool:
        """Whether the selection takes every parameter of the models that it takes."""
        inner = self.within is None or self.within.whole_models
        return inner and self.param_names is None and self.param_types is None and self.param_ids is None

    def models(self, model_ids: Sequence[str]) -> list[str]:
        """Return the model ids that the selection takes, in order (parameter conditions aside)."""
        kept = np.ones(len(model_ids), bool) if self.model_ids is None else matches(self.model_ids, model_ids)
        found = [model_id for model_id, keep in zip(model_ids, kept, strict=True) if keep]
        return found if self.within is None else self.within.models(found)

    def mask(self, view: View) -> NDArray[np.bool_]:
        """Return the (M, N) mask of the parameters of `view` that the selection takes."""
        mask: NDArray[np.bool_] = view.present.copy()
        if self.model_ids is not None:
            mask &= matches(self.model_ids, view.model_ids)[:, np.newaxis]
        if self.param_names is not None:
            mask &= matches(self.param_names, view.names)[np.newaxis, :]
        if self.param_types is not None:
            types = sorted({str(x) for x in view.type[mask]})
            kept = {t for t, keep in zip(types, matches(self.param_types, types), strict=True) if keep}
            mask &= np.isin(view.type.astype(str), sorted(kept)) if kept else False
        if self.param_ids is not None:
            wanted = set(self.param_ids)
            for model, name in zip(*np.nonzero(mask), strict=True):
                mask[model, name] = uid(view.model_ids[model], view.names[name]) in wanted
        return mask if self.within is None else mask & self.within.mask(view)


def matches(patterns: Sequence[str], candidates: Sequence[str]) -> NDArray[np.bool_]:
    """Return which candidates some pattern matches in full.

    A pattern that equals a candidate means that candidate alone, whatever characters are in it.

    >>> matches(["h.*.w", "re:b[0-9]+"], ["h.0.w", "b12", "b"]).tolist()
    [True, True, False]
    """
    found = np.zeros(len(candidates), bool)
    position = {candidate: i for i, candidate in enumerate(candidates)}
    for pattern in patterns:
        if pattern in position:
            found[position[pattern]] = True
        elif is_pattern(pattern):
            expression = _compiled(pattern)
            found |= np.fromiter((bool(expression.fullmatch(c)) for c in candidates), bool, len(candidates))
    return found


def _tuple(patterns: Any) -> tuple[str, ...] | None:
    """Return what users pass as text: None, one pattern or several, also as arrays and coordinates of a Dataset."""
    if patterns is None or isinstance(patterns, str):
        return None if patterns is None else (patterns,)
    try:
        several = [patterns] if getattr(patterns, "ndim", 1) == 0 else list(patterns)
    except TypeError:
        several = [patterns]
    found = [item if isinstance(item, str) or not hasattr(item, "item") else item.item() for item in several]
    if isinstance(patterns, bytes) or not all(isinstance(item, str) for item in found):
        raise FilterError(f"{patterns!r} is no selection; give text, or several in a list")
    return tuple(found)


def is_pattern(text: str) -> bool:
    """Return whether a text is a glob or a regular expression where no name equals it."""
    return text.startswith("re:") or any(c in text for c in "*?[")


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:], re.DOTALL)
    except re.error as error:
        raise FilterError(f"{pattern!r} is not a regular expression: {error}") from error

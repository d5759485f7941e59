"""How two artifacts differ: arrays by figures and a grid, documents by path, texts by line, collections by dataset."""

from __future__ import annotations

import difflib
import filecmp
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffract_dask.errors import ArtifactError
from diffract_dask.runs.array_diffs import diff_arrays
from diffract_dask.runs.arrays import ArrayRef, fields_of
from diffract_dask.runs.artifact_kinds import ArtifactKind, kind_of, reading
from diffract_dask.runs.previews import dataset_of, plain, pruned
from diffract_dask.runs.readers import Content
from diffract_dask.runs.weight_diffs import diff_weights, is_model

__all__ = ["ArtifactDiff", "diff_artifacts", "diff_documents", "diff_texts"]

_ENTRIES = 2000
_LINES = 20_000
_DEPTH = 200


@dataclass(frozen=True, slots=True)
class ArtifactDiff:
    """What :func:`diff_artifacts` returns.

    Parameters
    ----------
    name_a, name_b : str
    kind, view : str
        See :mod:`diffract_dask.runs.artifact_kinds`.
    equal : bool or None
        None where something could not be compared.
    dataset : str, optional
        The address, if one was asked for.
    data : dict
        Depends on `view`; arrays in it are NumPy arrays.
    notes : list of str
    """

    name_a: str
    name_b: str
    kind: str
    view: str
    equal: bool | None
    dataset: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self, *, packed: bool = False) -> dict[str, Any]:
        """Return plain data for strict JSON, as :func:`~diffract_dask.runs.previews.plain` does."""
        found: dict[str, Any] = plain({name: getattr(self, name) for name in self.__slots__}, packed=packed)
        return found


def diff_artifacts(
    a: str | Path,
    b: str | Path,
    dataset: str | None = None,
    *,
    dataset_b: str | None = None,
    kind: str | None = None,
    index: Sequence[int] | None = None,
    target: int = 256,
) -> ArtifactDiff:
    """Return how artifact `b` differs from artifact `a`.

    Parameters
    ----------
    a, b : path
        Of one kind, or two kinds that are read alike (a checkpoint and a weight store).
    dataset, dataset_b : str, optional
        One array of several; `dataset_b` where it has another address in `b`. Default: all, without grids.
    kind : str, optional
        Of both; default: what names or first bytes say.
    index : sequence of int, optional
        Of the plane that the grid shows; default: where the difference is largest.
    target : int
        Rows and columns of the grid.

    Raises
    ------
    ArtifactError
        They are of different kinds, or there is no such dataset.
    ArtifactNotFoundError, MissingExtraError
    """
    a, b = Path(a), Path(b)
    ours, theirs = kind_of(a, kind), kind_of(b, kind)
    if ours.view != theirs.view:
        raise ArtifactError(
            f"{a.name} is of the kind {ours.name!r} and {b.name} of the kind {theirs.name!r}; give two of one kind, or "
            "name the kind that both are to be read as"
        )
    names = a.name if a.name == b.name else f"{a.name} or {b.name}"
    with reading(names), ours.open(a) as content_a, theirs.open(b) as content_b:
        notes = [*(f"a: {note}" for note in content_a.notes), *(f"b: {note}" for note in content_b.notes)]
        view, data = _compared(
            ours, content_a, content_b, (dataset, dataset_b or dataset), (a, b), index, target, notes
        )
    equal = data.pop("equal")
    if equal and any("the first" in note for note in notes) and not filecmp.cmp(a, b, shallow=False):
        equal = False
        notes.append("they differ beyond the part that was read")
    return ArtifactDiff(a.name, b.name, ours.name, view, equal, dataset, data, notes)


def _compared(
    kind: ArtifactKind,
    a: Content,
    b: Content,
    datasets: tuple[str | None, str | None],
    paths: tuple[Path, Path],
    index: Sequence[int] | None,
    target: int,
    notes: list[str],
) -> tuple[str, dict[str, Any]]:
    if a.text is not None or b.text is not None:
        text_a, text_b = (
            one.text if one.text is not None else path.read_text("utf8")
            for one, path in zip((a, b), paths, strict=True)
        )
        return "text", diff_texts(text_a, text_b, (f"a/{paths[0].name}", f"b/{paths[1].name}"))
    if a.has_document and b.has_document:
        return kind.view, diff_documents(a.document, b.document)
    named = is_model(a, datasets[0]) or is_model(b, datasets[1])
    if kind.view == "weights" and (named or datasets[0] is None):
        model_a, model_b = (name if one.models else None for one, name in zip((a, b), datasets, strict=True))
        return kind.view, diff_weights(a, b, model_a, model_b)
    ref_a, ref_b = (dataset_of(one, name, path.name) for one, name, path in zip((a, b), datasets, paths, strict=True))
    if (
        ref_a is not None
        and ref_b is not None
        and (datasets[0] is not None or kind.view in ("array", "image", "bytes"))
    ):
        data = diff_arrays(ref_a, ref_b, index=index, target=target, bands=kind.view == "image")
        if kind.view == "bytes":
            data.pop("overlay", None)
        return kind.view, data
    return kind.view, diff_collections(a, b)


# ------------------------------------------------------------------------------------------------- collections


def diff_collections(a: Content, b: Content) -> dict[str, Any]:
    """Return how arrays by address differ: those in one only, and each in both by its figures, without grids."""
    ours, theirs = _by_address(a.arrays), _by_address(b.arrays)
    datasets = []
    for address, ref in ours.items():
        if address in theirs:
            datasets.append({"address": address, **diff_arrays(ref, theirs[address], target=0)})
    only_a, only_b = [x for x in ours if x not in theirs], [x for x in theirs if x not in ours]
    attrs = diff_documents(_attrs(a), _attrs(b))
    states = [one["equal"] for one in datasets]
    equal = not only_a and not only_b and attrs["equal"] and all(state is not False for state in states)
    return {
        "equal": None if equal and None in states else equal,
        "only_in_a": only_a,
        "only_in_b": only_b,
        "datasets": datasets,
        "attrs": attrs["entries"],
    }


def _by_address(refs: Sequence[ArrayRef]) -> dict[str, ArrayRef]:
    return {one.address: one for ref in refs for one in fields_of(ref)}


def _attrs(content: Content) -> dict[str, Any]:
    of_arrays = {ref.address: dict(ref.attrs) for ref in content.arrays if ref.attrs}
    return {**content.attrs, **({"datasets": of_arrays} if of_arrays else {})}


# ------------------------------------------------------------------------------------------------- documents


def diff_documents(a: Any, b: Any) -> dict[str, Any]:
    """Return the paths at which two documents differ.

    Returns
    -------
    dict
        ``equal``; ``entries``: ``path``, ``kind`` (added, removed, changed), ``a`` and ``b`` where they have a value;
        ``truncated`` if there are more than 2000.

    Notes
    -----
    Lists are compared entry by entry. 1 and 1.0 are one number of JSON; true is none. NaN equals NaN.

    Examples
    --------
    >>> diff_documents({"lr": 0.1, "tags": ["x"]}, {"lr": 0.2, "tags": ["x", "y"]})["entries"]
    [{'path': 'lr', 'kind': 'changed', 'a': 0.1, 'b': 0.2}, {'path': 'tags[1]', 'kind': 'added', 'b': 'y'}]
    """
    entries: list[dict[str, Any]] = []
    for path, kind, sides in _unequal(a, b, "", set(), 0):
        if len(entries) == _ENTRIES:
            return {"equal": False, "entries": entries, "truncated": True}
        entries.append({"path": path, "kind": kind} | {side: pruned(value, []) for side, value in sides.items()})
    return {"equal": not entries, "entries": entries}


def _unequal(
    a: Any, b: Any, path: str, seen: set[tuple[int, int]], depth: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    keyed = isinstance(a, Mapping) and isinstance(b, Mapping)
    listed = isinstance(a, list | tuple) and isinstance(b, list | tuple)
    if (not keyed and not listed) or depth > _DEPTH:
        if not _same(a, b):
            yield path, "changed", {"a": a, "b": b}
        return
    if (id(a), id(b)) in seen:  # YAML may name one part many times
        return
    seen.add((id(a), id(b)))
    keys: list[Any] = list(dict.fromkeys([*a, *b])) if keyed else list(range(max(len(a), len(b))))
    for key in keys:
        inner = f"{path}[{key}]" if listed else f"{path}.{key}" if path else str(key)
        in_a, in_b = (key in one if keyed else key < len(one) for one in (a, b))
        if in_a and in_b:
            yield from _unequal(a[key], b[key], inner, seen, depth + 1)
        elif in_a:
            yield inner, "removed", {"a": a[key]}
        else:
            yield inner, "added", {"b": b[key]}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return (type(a) is type(b) and a == b) or (isinstance(a, int | float) and isinstance(b, int | float) and a == b)


# ------------------------------------------------------------------------------------------------- texts


def diff_texts(a: str, b: str, names: tuple[str, str] = ("a", "b")) -> dict[str, Any]:
    """Return the unified difference of two texts, with counts of lines added and removed.

    >>> print(diff_texts("one\\ntwo\\n", "one\\n2\\n")["diff"])
    --- a
    +++ b
    @@ -1,2 +1,2 @@
     one
    -two
    +2
    """
    if a == b:
        return {"equal": True, "diff": "", "added": 0, "removed": 0}
    ours, theirs = a.splitlines(), b.splitlines()
    cut = max(len(ours), len(theirs)) > _LINES
    lines = list(difflib.unified_diff(ours[:_LINES], theirs[:_LINES], *names, lineterm=""))
    body = lines[2:]
    told = {
        "equal": False,
        "diff": "\n".join(lines),
        "added": sum(line.startswith("+") for line in body),
        "removed": sum(line.startswith("-") for line in body),
    }
    if cut:
        told["note"] = f"of longer texts the first {_LINES} lines are compared"
    elif not lines:
        told["note"] = "the texts differ in the ends of lines alone"
    return told

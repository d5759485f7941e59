"""Checkpoints cut into several files: which files, and which tensor is expected in which."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffract_dask.errors import CorruptFileError, SourceError, UnsupportedSourceError, did_you_mean

if TYPE_CHECKING:
    from diffract_dask.catalog import Tensor

__all__ = ["INDEX", "Shards", "merge", "resolve", "shard_files"]

INDEX = ".index.json"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\..*)")
_BESIDE = re.compile(
    r"(optim(izer)?|scheduler|scaler|sampler|rng_states?|random_states?|train(ing|er)?_(args|state))[._-].*"
    r"|.*_optim_states\..*"
)
"""Files that trainers leave beside the weights, in lower case."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of one checkpoint.

    Parameters
    ----------
    files : list of str
    source : str
        What the user gave.
    index : str
        Path of the index, empty without one.
    expected : dict of str to str
        The index: file by tensor name.
    """

    files: list[str]
    source: str
    index: str
    expected: dict[str, str]


def shard_files(folder: str | Path, suffixes: Sequence[str]) -> list[str]:
    """Return the names in `folder` that end in one of `suffixes`, or in that and ``.index.json``, sorted.

    The state of optimizers, schedulers and the like, as trainers leave it beside the weights, is left out.
    """
    ends = tuple(suffixes) + tuple(suffix + INDEX for suffix in suffixes)
    names = {name: name.lower() for name in os.listdir(folder)}
    return sorted(name for name, lower in names.items() if lower.endswith(ends) and not _BESIDE.fullmatch(lower))


def resolve(model: str | Path | Sequence[str | Path], suffixes: Sequence[str]) -> Shards:
    """Return the files of a checkpoint given as a file, an index, a folder or a list of files.

    Raises
    ------
    CorruptFileError
        A shard is missing, or the index is not one.
    SourceError
        Nothing is there, or the folder holds several checkpoints.
    """
    if not isinstance(model, str | Path):
        files = [os.path.abspath(path) for path in model]
        for path in files:
            if not os.path.isfile(path):
                raise SourceError(f"shard {path!r} does not exist")
        _check_numbering(files)
        return Shards(files, ", ".join(files), "", {})
    path = os.path.abspath(model)
    if os.path.isdir(path):
        return _folder(path, suffixes)
    return _index(path) if path.endswith(INDEX) else Shards([path], path, "", {})


def _folder(path: str, suffixes: Sequence[str]) -> Shards:
    found = shard_files(path, suffixes)
    indexes = [name for name in found if name.endswith(INDEX)]
    usual = [name for name in indexes if name.startswith(("model.", "pytorch_model."))]
    if len(indexes) > 1 and len(usual) != 1:
        raise SourceError(f"folder {path!r} holds several checkpoints: {', '.join(indexes)}; give one of these files")
    if indexes:
        return _index(os.path.join(path, (usual or indexes)[0]), source=path)
    if not found:
        raise UnsupportedSourceError(f"folder {path!r} holds no {' or '.join(suffixes)} file")
    files = [os.path.join(path, name) for name in found]
    _check_numbering(files)
    return Shards(files, path, "", {})


def _index(path: str, source: str = "") -> Shards:
    try:
        content = json.loads(Path(path).read_bytes())
        weight_map = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(
            f"index {path!r} is not JSON with a mapping 'weight_map' of tensor names to files"
        ) from error
    folder = os.path.dirname(path)
    expected = {name: os.path.join(folder, file) for name, file in weight_map.items()}
    files = sorted(set(expected.values()))
    for file in files:
        if not os.path.isfile(file):
            names = [name for name, where in expected.items() if where == file]
            raise CorruptFileError(
                f"index {path!r} names the shard {os.path.basename(file)!r}, which is not there; it should hold "
                f"{names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''}. Fetch the file again"
            )
    return Shards(files, source or path, path, expected)


def _check_numbering(files: Iterable[str]) -> None:
    """Refuse ``…-00001-of-00003…`` without its siblings."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for path in files:
        match = _NUMBERED.fullmatch(path)
        if match:
            sets.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, total, end), numbers in sets.items():
        missing = sorted(set(range(1, int(total) + 1)) - numbers)
        # Some writers count from 0.
        if missing and numbers != set(range(int(total))):
            name = f"{os.path.basename(stem)}-{missing[0]:0{len(total)}d}-of-{total}{end}"
            raise CorruptFileError(
                f"the shard {name!r} is missing in {os.path.dirname(stem)!r}: expected {int(total)} files, found "
                f"{len(numbers)}"
            )


def merge(shards: Shards, content: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors of all files, checked against the index.

    Parameters
    ----------
    shards : Shards
    content : mapping of file to tensors

    Raises
    ------
    CorruptFileError
        The index lists a tensor that its shard does not hold, or two shards hold one name and no index decides.
    """
    held = {file: {tensor.name for tensor in tensors} for file, tensors in content.items()}
    for name, file in shards.expected.items():
        if name not in held[file]:
            raise _missing(shards, name, file, held[file])
    owner: dict[str, str] = {}
    merged: list[Tensor] = []
    for file, tensors in content.items():
        for tensor in tensors:
            if shards.expected.get(tensor.name, file) != file:
                continue
            first = owner.setdefault(tensor.name, file)
            if first != file:
                raise CorruptFileError(
                    f"{tensor.name!r} is in both {first!r} and {file!r}; give the files of one checkpoint only"
                )
            merged.append(tensor)
    return merged


def _missing(shards: Shards, name: str, file: str, held: Iterable[str]) -> CorruptFileError:
    return CorruptFileError(
        f"index {shards.index!r} lists the tensor {name!r} in the shard {os.path.basename(file)!r}, which does not "
        f"hold it.{did_you_mean(name, held)} Fetch both files again"
    )

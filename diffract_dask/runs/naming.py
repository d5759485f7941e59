"""Names and the folders that stand for them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from diffract_dask.errors import ArtifactError, DeclarationError, UnknownNameError, did_you_mean

__all__ = ["check_kind", "check_known", "check_name", "folder", "inside", "names", "own_name"]

_LONGEST = 120
_CUT = re.compile(rf".{{{_LONGEST - 10}}}-[0-9a-f]{{8}}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def check_name(name: object, what: str) -> str:
    """Return a name, which is any printable text that is not empty.

    Raises
    ------
    DeclarationError
        It is something else.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise DeclarationError(f"the name of a {what} is a printable text that is not empty, not {name!r}")
    return name


def own_name(variables: Mapping[str, Any]) -> str:
    """Return the name of the module with these globals; of a script, the name it would be imported by."""
    name = str(variables.get("__name__", "__main__"))
    if name != "__main__":
        return name
    spec, file = variables.get("__spec__"), variables.get("__file__")
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return os.path.splitext(os.path.basename(file))[0] if file and os.path.isfile(file) else name


def folder(name: str) -> str:
    """Return the folder of a name: itself where that is safe, else quoted; long ones are cut and given a hash.

    >>> folder("jitter low"), folder("a/b"), folder(".."), folder("_scripts")
    ('jitter low', 'a%2Fb', '%2E%2E', '%5Fscripts')
    """
    text = quote(name, safe=" +=,@()[]{}'!;")
    if text[-1] in ". ":
        text = f"{text[:-1]}%{ord(text[-1]):02X}"
    if text[0] in "._ " or _RESERVED.fullmatch(text):
        text = f"%{ord(text[0]):02X}{text[1:]}"
    if len(text) > _LONGEST or _CUT.fullmatch(text):  # what looks like a name that was cut is told apart from it
        text = f"{text[: _LONGEST - 10]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return text


def names(value: str | Iterable[str] | None, what: str) -> tuple[str, ...]:
    """Return names as a tuple; a bare string is one name, not its letters."""
    if not isinstance(value, (Iterable, type(None))):
        raise DeclarationError(f"the name of a {what}, or several, was expected, not {value!r}")
    found = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    return tuple(check_name(name, what) for name in found)


def check_kind(value: object, kind: Any, what: str) -> None:
    """Refuse what is of another class.

    Raises
    ------
    DeclarationError
        It is.
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise DeclarationError(f"{what} is a {' or '.join(each.__name__ for each in kinds)}, not {value!r}")


def check_known(wanted: Iterable[str], known: Iterable[str], what: str, where: str) -> None:
    """Refuse names that are not among the known ones.

    Raises
    ------
    UnknownNameError
        The message has the nearest names.
    """
    known = list(known)
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known) or (f" There are {', '.join(map(repr, known))}." if known else "")
            raise UnknownNameError(f"{where} has no {what} {name!r}.{hint}")


def inside(base: Path, relpath: str | os.PathLike[str], what: str) -> Path:
    """Return ``base / relpath`` for a relative path that stays within `base`.

    Raises
    ------
    ArtifactError
        It is absolute, empty, or leaves the folder.
    """
    text = os.fspath(relpath).replace(os.sep, "/")
    parts = PurePosixPath(text).parts
    if not parts or text.startswith("/") or ".." in parts or os.path.isabs(text) or "\0" in text:
        raise ArtifactError(f"{what} {text!r} is not a path inside {base.name}/; give a relative one without '..'")
    return base.joinpath(*parts)

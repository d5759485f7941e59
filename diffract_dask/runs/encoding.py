"""The canonical form of values: strict JSON, typed, equal for equal values in every process; and files of it.

What JSON has is written as it is, so that 1, 1.0 and true differ. The rest is written as an object with one key
that starts with ``$``: ``{"$float": "nan"}``, ``{"$complex": [re, im]}``, ``{"$array": {...}}`` and so on. A user's
own key that starts with ``$`` is written with one more.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

from diffract_dask.errors import UnencodableError
from diffract_dask.runs.naming import own_name

__all__ = [
    "canonical",
    "decode",
    "dumps",
    "encode",
    "fingerprint",
    "loads",
    "plain_text",
    "read_json",
    "strict",
    "write_json",
    "write_text",
]


_MOST_BITS = 13000


def encode(value: Any, where: str = "value", *, whole: bool = True) -> Any:
    """Return `value` as plain JSON data.

    Parameters
    ----------
    value : object
        None, a boolean, number, string, bytes, path, date, enumeration member, array without objects, or a
        mapping, sequence or set of these.
    where : str
        Its name, for the message.
    whole : bool
        Write the entries of arrays too, and not their digest alone.

    Raises
    ------
    UnencodableError
        It, or something within it, has no canonical form; the message names it.

    Examples
    --------
    >>> encode({"a": (1, 1.0, True), "b": float("nan"), 3: b"x"})
    {'$map': [['a', [1, 1.0, True]], ['b', {'$float': 'nan'}], [3, {'$bytes': 'eA=='}]]}
    """
    if isinstance(value, Enum):
        return _enumerated(value, where, whole)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise UnencodableError(f"{where} is an integer of more than 4000 digits, which Python does not write as text")
    if isinstance(value, (int, str)):
        return int(value) if isinstance(value, int) else str(value)
    if isinstance(value, float):
        return _float(float(value))
    if isinstance(value, Mapping):
        return _mapping(value, where, whole)
    if isinstance(value, (list, tuple)):
        return [encode(item, f"{where}[{i}]", whole=whole) for i, item in enumerate(value)]
    if isinstance(value, Set):
        items = [encode(item, f"an item of {where}", whole=whole) for item in value]
        return {"$set": sorted(items, key=plain_text)}
    return _rare(value, where, whole)


def _enumerated(value: Enum, where: str, whole: bool) -> Any:
    """Return a member by name and by value: both can change, and either changes what a stage does."""
    kind = type(value)
    module = own_name(vars(sys.modules[kind.__module__])) if kind.__module__ in sys.modules else kind.__module__
    name = f"{module}.{kind.__qualname__}.{value.name}"
    try:
        return {"$enum": [name, encode(value.value, where, whole=whole)]}
    except UnencodableError:
        return {"$enum": name}


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def _mapping(value: Mapping[Any, Any], where: str, whole: bool) -> Any:
    if all(isinstance(key, str) for key in value):
        escaped = ((f"${key}" if key.startswith("$") else str(key), key) for key in value)
        return {name: encode(value[key], f"{where}.{key}", whole=whole) for name, key in escaped}
    pairs = [
        [encode(key, f"a key of {where}", whole=whole), encode(item, f"{where}[{key!r}]", whole=whole)]
        for key, item in value.items()
    ]
    return {"$map": pairs}


def _rare(value: Any, where: str, whole: bool) -> Any:
    if isinstance(value, complex):
        return {"$complex": [_float(value.real), _float(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, PurePath):
        return {"$path": value.as_posix()}
    if isinstance(value, (datetime, date, time)):
        return {f"${type(value).__name__}": value.isoformat()}
    if isinstance(value, timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, (Decimal, Fraction)):
        return {f"${type(value).__name__.lower()}": str(value)}
    numpy = sys.modules.get("numpy")  # a value of NumPy exists only where NumPy was imported
    if numpy is not None and isinstance(value, numpy.generic) and type(value.item()) in (bool, int, float, complex):
        return encode(value.item(), where)
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        known = (numpy.ndarray, numpy.memmap, numpy.matrix, numpy.recarray)
        if isinstance(value, numpy.generic) or type(value) in known:  # others have masks or units, which would be lost
            return _array(numpy.asarray(value), whole)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnencodableError(
        f"{where} is {_an(kind)} ({str(value)[:60]!r}), which has no canonical form; give numbers, strings, booleans, "
        "None, bytes, paths, dates, enumeration members, NumPy arrays, or lists, sets and dicts of these"
    )


def _an(kind: str) -> str:
    kind = kind.removeprefix("builtins.")
    return f"an object of {kind}"


def _array(array: Any, whole: bool) -> Any:
    import numpy as np

    array = np.ascontiguousarray(array).reshape(array.shape)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = little.tobytes()
    dtype = little.dtype.str if little.dtype.names is None else repr(little.dtype.descr)
    told: dict[str, Any] = {"dtype": dtype, "shape": list(array.shape)}
    if whole and little.dtype.names is None:
        return {"$array": {**told, "data": base64.b64encode(data).decode("ascii")}}
    return {"$array": {**told, "sha256": hashlib.sha256(data).hexdigest()}}


def decode(data: Any) -> Any:
    """Return the value that `encode` was given; structured arrays and enumeration members stay as they are written.

    >>> decode(encode({"a": float("inf"), "$b": {1, 2}})) == {"a": float("inf"), "$b": {1, 2}}
    True
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        (tag, body), *_ = data.items()
        if tag in _DECODE:
            return _DECODE[tag](body)
    return {key.removeprefix("$") if key.startswith("$$") else key: decode(item) for key, item in data.items()}


def _decode_array(body: dict[str, Any]) -> Any:
    if "data" not in body:
        return {"$array": body}
    import numpy as np

    array = np.frombuffer(base64.b64decode(body["data"]), body["dtype"]).reshape(body["shape"])
    return array


def _pair(body: list[Any]) -> complex:
    return complex(decode(body[0]), decode(body[1]))


_DECODE: dict[str, Any] = {
    "$float": float,
    "$complex": _pair,
    "$bytes": base64.b64decode,
    "$path": Path,
    "$datetime": datetime.fromisoformat,
    "$date": date.fromisoformat,
    "$time": time.fromisoformat,
    "$timedelta": lambda body: timedelta(*body),
    "$decimal": Decimal,
    "$fraction": Fraction,
    "$set": lambda body: {_hashable(decode(item)) for item in body},
    "$map": lambda body: {_hashable(decode(key)): decode(item) for key, item in body},
    "$array": _decode_array,
}


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    return frozenset(_hashable(item) for item in value) if isinstance(value, set) else value


def plain_text(data: Any) -> str:
    """Return the canonical text of plain JSON data, such as `encode` returns."""
    return json.dumps(_sorted_maps(data), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sorted_maps(data: Any) -> Any:
    """Order the pairs of mappings whose keys are not all strings; json orders the others."""
    if isinstance(data, list):
        return [_sorted_maps(item) for item in data]
    if isinstance(data, dict):
        found = {key: _sorted_maps(item) for key, item in data.items()}
        if found.keys() == {"$map"}:
            found["$map"] = sorted(found["$map"], key=lambda pair: json.dumps(pair, sort_keys=True))
        return found
    return data


def canonical(value: Any, where: str = "value") -> str:
    """Return the canonical text of a value: equal for equal values, different for different ones.

    >>> canonical({"b": 1, "a": 1.0}) == canonical({"a": 1.0, "b": 1})
    True
    >>> len({canonical(1), canonical(1.0), canonical(True), canonical("1")})
    4
    """
    return plain_text(encode(value, where))


def fingerprint(value: Any, where: str = "value") -> str:
    """Return the SHA-256 of the canonical text of a value: 64 hexadecimal digits.

    >>> fingerprint({"amp": 0.1})[:12]
    '544671a79c52'

    Raises
    ------
    UnencodableError
        Something in the value has no canonical form.
    """
    return hashlib.sha256(canonical(value, where).encode("ascii")).hexdigest()


def strict(data: Any) -> Any:
    """Return plain JSON data with every float that is not finite written as ``{"$float": …}``; no keys are escaped."""
    if isinstance(data, float):
        return _float(data)
    if isinstance(data, dict):
        return {str(key): strict(item) for key, item in data.items()}
    if isinstance(data, (list, tuple)):
        return [strict(item) for item in data]
    return data


_LONE = re.compile("[\ud800-\udfff]")


def dumps(data: Any) -> str:
    """Return indented strict JSON, with a newline at the end."""
    text = json.dumps(strict(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return _LONE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # of file names that are no UTF-8


def _bare_constant(name: str) -> Any:
    return _float(float(name.replace("Infinity", "inf")))


_DECODER = json.JSONDecoder(parse_constant=_bare_constant)


def loads(text: str | bytes) -> Any:
    """Read JSON; bare NaN and Infinity, which other tools write, come as ``{"$float": …}``."""
    return _DECODER.decode(text if isinstance(text, str) else text.decode("utf8", "surrogatepass"))


def read_json(path: str | os.PathLike[str], default: Any = None) -> Any:
    """Return what a file of JSON holds, or `default` if it is missing or is no JSON."""
    try:
        with open(path, "rb") as file:
            return loads(file.read())
    except (OSError, ValueError):
        return default


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Replace a file by JSON, at once: a reader sees the old text or the new."""
    write_text(path, dumps(data))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file by a text, at once."""
    partial = f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.partial"
    try:
        with open(partial, "w", encoding="utf8", errors="surrogatepass", newline="\n") as file:
            file.write(text)
            file.flush()
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def sha256_of(parts: Iterable[str]) -> str:
    """Return the SHA-256 of texts, one a line."""
    return hashlib.sha256("\n".join(parts).encode("utf8", "surrogatepass")).hexdigest()

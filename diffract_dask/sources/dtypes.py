"""Stored data types by name: how their bytes travel, and what they decode to.

A *raw* array is what a source reads and the store keeps: little-endian, C order, in the *carrier* of its stored
type. NumPy's own types carry themselves; ``bfloat16`` travels as ``uint16`` codes and each ``float8`` type as
``uint8`` codes, which :func:`decode` turns into ``float32`` exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import UnsupportedSourceError, did_you_mean

__all__ = [
    "DTYPES",
    "StoredType",
    "carrier",
    "decode",
    "decoded",
    "dtype_name",
    "has_carrier",
    "is_complex",
    "is_float",
    "is_integer",
    "is_packed",
    "itemsize",
    "rounding",
]


@dataclass(frozen=True, slots=True)
class StoredType:
    """One stored type.

    Parameters
    ----------
    kind : {"float", "integer", "bool", "complex"}
        What the values are.
    carrier : dtype
        Of raw arrays.
    decoded : dtype
        After :func:`decode`.
    layout : tuple of (int, int, int, str), optional
        Exponent bits, mantissa bits, bias and variant of an eight-bit float. Variants: ``ieee`` has infinities and
        NaN, ``fn`` only the NaN with all bits set, ``fnuz`` only the NaN in place of -0.
    """

    kind: Literal["float", "integer", "bool", "complex"]
    carrier: np.dtype[Any]
    decoded: np.dtype[Any]
    layout: tuple[int, int, int, str] | None = None


def _own(kind: Literal["float", "integer", "bool", "complex"], code: str) -> StoredType:
    return StoredType(kind, np.dtype(code), np.dtype(code))


def _eight(exponent: int, mantissa: int, bias: int, variant: str) -> StoredType:
    return StoredType("float", np.dtype("u1"), np.dtype("<f4"), (exponent, mantissa, bias, variant))


DTYPES: MappingProxyType[str, StoredType] = MappingProxyType(
    {
        "float64": _own("float", "<f8"),
        "float32": _own("float", "<f4"),
        "float16": _own("float", "<f2"),
        "bfloat16": StoredType("float", np.dtype("<u2"), np.dtype("<f4")),
        "float8_e4m3fn": _eight(4, 3, 7, "fn"),
        "float8_e5m2": _eight(5, 2, 15, "ieee"),
        "float8_e4m3fnuz": _eight(4, 3, 8, "fnuz"),
        "float8_e5m2fnuz": _eight(5, 2, 16, "fnuz"),
        "float8_e4m3b11fnuz": _eight(4, 3, 11, "fnuz"),
        "float8_e4m3": _eight(4, 3, 7, "ieee"),
        "float8_e3m4": _eight(3, 4, 3, "ieee"),
        "float8_e8m0fnu": _eight(8, 0, 127, "exponent"),
        "int64": _own("integer", "<i8"),
        "int32": _own("integer", "<i4"),
        "int16": _own("integer", "<i2"),
        "int8": _own("integer", "i1"),
        "uint64": _own("integer", "<u8"),
        "uint32": _own("integer", "<u4"),
        "uint16": _own("integer", "<u2"),
        "uint8": _own("integer", "u1"),
        "bool": _own("bool", "?"),
        "complex64": _own("complex", "<c8"),
        "complex128": _own("complex", "<c16"),
    }
)
"""Types whose bytes can be read and kept. Any other name (``string``, ``object``, packed four-bit types) may stand
in a table of parameters, but has no raw form."""


def has_carrier(name: str) -> bool:
    """Return whether tensors of the type `name` have a raw form that can be read and stored."""
    return name in DTYPES


def _stored(name: str) -> StoredType:
    if name not in DTYPES:
        raise UnsupportedSourceError(f"the stored type {name!r} has no raw form.{did_you_mean(name, DTYPES)}")
    return DTYPES[name]


def carrier(name: str) -> np.dtype[Any]:
    """Return the dtype of raw arrays of the stored type `name`; UnsupportedSourceError if it has none."""
    return _stored(name).carrier


def decoded(name: str) -> np.dtype[Any]:
    """Return the dtype that :func:`decode` gives for the stored type `name`."""
    return _stored(name).decoded


def rounding(name: str) -> float:
    """Return the unit roundoff of the stored type `name`: the largest relative error of rounding to it.

    Half the distance from 1 to the next number; 0 for whole numbers, which are exact.

    >>> rounding("float32") == 2.0**-24, rounding("bfloat16") == 2.0**-8, rounding("int8")
    (True, True, 0.0)
    """
    stored = _stored(name)
    if stored.kind not in ("float", "complex"):
        return 0.0
    if stored.layout is not None:
        return 2.0 ** -(stored.layout[1] + 1)
    return 2.0**-8 if name == "bfloat16" else float(np.finfo(stored.decoded).eps) / 2


def itemsize(name: str) -> int:
    """Return the bytes per entry of the stored type `name`, 0 if it has no raw form."""
    return DTYPES[name].carrier.itemsize if name in DTYPES else 0


def is_float(name: str) -> bool:
    """Return whether `name` is a real floating type that can be decoded."""
    return name in DTYPES and DTYPES[name].kind == "float"


def is_integer(name: str) -> bool:
    """Return whether `name` is an integer type or bool."""
    return name in DTYPES and DTYPES[name].kind in ("integer", "bool")


def is_complex(name: str) -> bool:
    """Return whether `name` is a complex type, readable or not."""
    return name.startswith("complex")


def is_packed(name: str) -> bool:
    """Return whether `name` is a type of less than eight bits, which only quantised weights have.

    >>> is_packed("float4_e2m1fn_x2"), is_packed("float64")
    (True, False)
    """
    stem = name.split("_")[0].lstrip("uq")
    return stem in ("int1", "int2", "int3", "int4", "int5", "int6", "int7", "float4", "float6")


def decode(raw: NDArray[Any], name: str) -> NDArray[Any]:
    """Return the values of a raw array: float8 and bfloat16 exactly as float32, all else unchanged.

    Parameters
    ----------
    raw : ndarray
        In the carrier of `name`.
    name : str
        The stored type.

    Returns
    -------
    ndarray
        Of dtype :func:`decoded`; `raw` itself where nothing is to be done.

    Examples
    --------
    >>> decode(np.array([0x3F80, 0xC000], np.uint16), "bfloat16")
    array([ 1., -2.], dtype=float32)
    """
    stored = _stored(name)
    if stored.layout is not None:
        values: NDArray[Any] = _table(*stored.layout)[raw]
        return values
    if name == "bfloat16":
        widened: NDArray[np.uint32] = np.left_shift(raw, np.uint32(16), dtype=np.uint32)
        return widened.view(np.float32)
    return raw


@cache
def _table(exponent: int, mantissa: int, bias: int, variant: str) -> NDArray[np.float32]:
    """Return the float32 value of each of the 256 codes of an eight-bit float."""
    codes = np.arange(256)
    if variant == "exponent":
        powers: NDArray[np.float64] = np.exp2(codes.astype(float) - bias)
        powers[255] = np.nan
        return powers.astype(np.float32)
    biased = (codes >> mantissa) & (2**exponent - 1)
    fraction = (codes & (2**mantissa - 1)) / 2**mantissa
    normal = biased > 0
    values: NDArray[np.float64] = np.where(normal, 1 + fraction, fraction) * np.exp2(
        np.where(normal, biased, 1) - float(bias)
    )
    if variant == "ieee":
        top = biased == 2**exponent - 1
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    elif variant == "fn":
        values[codes & 0x7F == 0x7F] = np.nan
    values[128:] *= -1
    if variant == "fnuz":
        values[128] = np.nan
    return values.astype(np.float32)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the stored name of a NumPy (or ml_dtypes) dtype, whatever its byte order.

    >>> dtype_name(np.dtype(">f4")), dtype_name(np.dtype("U3"))
    ('float32', 'string')
    """
    if dtype.kind in "USTa":
        return "string"
    if dtype.kind == "O":
        return "object"
    if dtype.kind == "V" and dtype.type is np.void:
        return "void"
    return dtype.name

"""PyTorch: modules, tensors, and files that ``torch.save`` wrote. Nothing in a file is ever executed."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import Checkpoint, SkipReason, Tensor
from diffract_dask.errors import CorruptFileError, MissingExtraError, UnsafePickleError, UnsupportedSourceError
from diffract_dask.sources import dtypes
from diffract_dask.sources.arrays import array_tensor, from_torch, unwrap
from diffract_dask.sources.shards import merge, resolve
from diffract_dask.sources.zipped import is_zip, opened_zip

__all__ = ["SUFFIXES", "is_module", "open_module", "open_torch_file", "torch_tensor"]

SUFFIXES = (".pt", ".pth", ".pth.tar", ".bin", ".ckpt")

_KINDS = {
    "Linear": "dense",
    "Conv1D": "dense",  # of Hugging Face: a linear layer with the weight (in, out)
    "MultiheadAttention": "dense",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding",
    "_ConvNd": "conv",
    "RNNBase": "recurrent",
    "RNNCellBase": "recurrent",
    "_NormBase": "norm",
    "LayerNorm": "norm",
    "GroupNorm": "norm",
    "RMSNorm": "norm",
    "PReLU": "other",
}
_SAFE_SINCE = (2, 6)
"""Before, weights_only=True could be tricked into running code (CVE-2025-32434)."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_MORE_BYTES = re.compile(r"expected (\d+) more bytes")


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise MissingExtraError(
            "reading PyTorch models needs PyTorch, which is not installed: pip install 'diffract_dask[torch]'. "
            "safetensors files and mappings of NumPy arrays need no framework"
        ) from error


def is_module(model: Any) -> bool:
    """Return whether `model` is a ``torch.nn.Module``, without importing PyTorch."""
    return any(cls.__name__ == "Module" and cls.__module__.startswith("torch.") for cls in type(model).__mro__)


def open_module(model: Any) -> Checkpoint:
    """Open a ``torch.nn.Module``: the entries of its state dict, by the same names as in a file of them.

    A parametrised weight (``weight_norm`` and the like) appears by its parts, as it does in the state dict.
    """
    _torch()
    kinds = {name: _kind(module) for name, module in model.named_modules(remove_duplicate=False)}
    tensors: list[Tensor] = []
    for name, value in model.state_dict(keep_vars=True).items():
        if not (from_torch(value) and hasattr(value, "untyped_storage")):
            tensors.append(array_tensor(name, value))
            continue
        tensors.append(torch_tensor(name, value, kinds.get(name.rpartition(".")[0], "")))
    return Checkpoint(tensors, f"{type(model).__module__}.{type(model).__qualname__}", "torch")


def _kind(module: Any) -> str:
    for cls in type(module).__mro__:
        if cls.__name__ in _KINDS:
            return _KINDS[cls.__name__]
        if cls.__name__.endswith("Norm"):
            return "norm"
    return ""


# ------------------------------------------------------------------------------------------------------- tensors


def torch_tensor(name: str, value: Any, kind: str = "") -> Tensor:
    """Return the tensor of a PyTorch tensor of any layout, device and type; it is not copied."""
    torch = _torch()
    dtype = str(getattr(value, "dtype", "object")).removeprefix("torch.")
    if not isinstance(value, torch.Tensor):
        return Tensor(name, (), "object", partial(_refuse, name), skip=SkipReason.NOT_NUMERIC)
    if torch.nn.parameter.is_lazy(value):
        return Tensor(name, (), dtype, partial(_refuse, name), skip=SkipReason.NO_DATA)
    shape = tuple(int(n) for n in value.shape) if not value.is_nested else ()
    pointer, skip = _memory(value, torch)
    if skip:
        return Tensor(name, shape, dtype, partial(_refuse, name), kind=kind if shape else "", skip=skip)
    storage = (str(value.device), pointer, value.storage_offset(), shape, value.stride(), dtype) if pointer else None
    read = partial(_rows, value, dtype) if dtypes.has_carrier(dtype) else partial(_refuse, name)
    return Tensor(name, shape, dtype, read, storage=storage, kind=kind if shape else "")


def _memory(value: Any, torch: Any) -> tuple[int, str]:
    """Return the address of a tensor's memory, and why it cannot be read, if it cannot."""
    if value.is_quantized or getattr(value, "quant_state", None) is not None:
        return 0, SkipReason.QUANTISED
    if value.is_nested or value.layout is not torch.strided:
        return 0, SkipReason.SPARSE
    try:
        pointer = int(value.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        pointer = 0
    if pointer or not value.numel():
        return pointer, ""
    described = f"{type(value).__module__}.{type(value).__qualname__}".lower()
    return 0, SkipReason.QUANTISED if "quant" in described else SkipReason.NO_DATA


def _rows(value: Any, dtype: str, start: int, stop: int) -> NDArray[Any]:
    torch = _torch()
    rows = value.detach()
    rows = rows[start:stop] if rows.dim() else rows
    rows = rows.resolve_conj().resolve_neg().cpu().contiguous()
    carrier = dtypes.carrier(dtype)
    if dtypes.decoded(dtype) != carrier:
        rows = rows.view(torch.int16 if carrier.itemsize == 2 else torch.uint8)
    array: NDArray[Any] = rows.numpy()
    return array.view(carrier)


def _refuse(name: str, start: int, stop: int) -> NDArray[np.generic]:
    raise UnsupportedSourceError(f"rows {start} to {stop} of {name!r} cannot be read: its data is not dense and here")


# --------------------------------------------------------------------------------------------------------- files


def open_torch_file(model: str | Path | Sequence[str | Path]) -> Checkpoint:
    """Open what ``torch.save`` wrote: a file, a sharded folder, an index (``.bin.index.json``) or a list of files.

    Read with ``weights_only=True`` and mapped, so that what is left out (the optimizer's state) is not loaded.

    Raises
    ------
    MissingExtraError
        PyTorch is not installed, or too old to read files safely.
    UnsafePickleError
        The file holds more than tensors and plain Python values; nothing in it was executed.
    CorruptFileError
        The file is cut off, or is none of PyTorch's.
    UnsupportedSourceError
        The file holds no mapping of names to tensors.
    """
    _torch()
    shards = resolve(model, SUFFIXES)
    content: dict[str, list[Tensor]] = {}
    attrs: dict[str, Any] = {}
    for path in shards.files:
        loaded = _load(path)
        if not isinstance(loaded, Mapping):
            raise UnsupportedSourceError(
                f"{path!r} holds a {type(loaded).__name__}; expected a mapping of names to tensors, as "
                "torch.save(model.state_dict(), path) writes it"
            )
        found = unwrap(loaded)
        attrs.update(found.attrs)
        content[path] = found.tensors()
    return Checkpoint(merge(shards, content), shards.source, "torch", attrs)


def _load(path: str) -> Any:
    torch = _torch()
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < _SAFE_SINCE:
        raise MissingExtraError(
            f"PyTorch {torch.__version__} cannot read untrusted files safely; 2.6 or newer is needed for {path!r}: "
            "pip install -U 'diffract_dask[torch]'"
        )
    archive = is_zip(path)
    with open(path, "rb") as file:
        if not (archive or file.read(1) == pickle.PROTO):
            raise _corrupt(path, "it is neither a zip file nor a pickle")
        file.seek(0)
        if archive:
            with opened_zip(path):
                return _unpickle(path, path, mmap=True)
        loaded = _unpickle(path, file, mmap=False)
        end, size = file.tell(), os.path.getsize(path)
    if end != size:
        raise CorruptFileError(f"{path!r} has bytes appended: expected {end} bytes, found {size}. Fetch it again")
    return loaded


def _unpickle(path: str, source: Any, *, mmap: bool) -> Any:
    """Return what the file `path`, open as `source`, holds; refuse what would execute code."""
    torch = _torch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated storages, of old files
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        text = str(error)
        named = _GLOBAL.search(text)
        if named or "nsupported" in text:
            what = f"the global {named[1]!r}" if named else "an instruction that is not allowed"
            raise _unsafe(path, what) from error
        raise _corrupt(path, "its pickle cannot be read") from error
    except (MemoryError, OSError):
        raise
    except Exception as error:  # a broken pickle can fail in any way
        if "weights_only" in str(error):
            raise _unsafe(path, "a TorchScript program or a format that cannot be read safely") from error
        raise _corrupt(path, _why(path, error)) from error


def _why(path: str, error: Exception) -> str:
    size = os.path.getsize(path)
    more = _MORE_BYTES.search(str(error))
    if more:
        return f"expected at least {size + int(more[1])} bytes, found {size}"
    return str(error).partition("\n")[0] or f"expected more than {size} bytes, its pickle does not end"


def _corrupt(path: str, why: str) -> CorruptFileError:
    size = os.path.getsize(path)
    return CorruptFileError(f"{path!r} ({size} bytes) is cut off or was not written by PyTorch: {why}")


def _unsafe(path: str, what: str) -> UnsafePickleError:
    return UnsafePickleError(
        f"{path!r} holds {what}, so that loading it could run code; nothing in it was executed. If you trust the file, "
        "load it yourself and add the object: models.add(torch.load(path, weights_only=False)); better, save "
        "model.state_dict() as safetensors"
    )

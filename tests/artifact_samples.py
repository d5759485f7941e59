"""One artifact for each kind in the table, written from a matrix."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffract_dask import Session
from diffract_dask.testing import write_safetensors

__all__ = ["SAMPLES", "Sample", "matrix"]


def matrix(change: float = 0.0) -> NDArray[np.float64]:
    """Return a 6 × 5 matrix; `change` is added to the entry [2, 3]."""
    made = np.arange(30.0).reshape(6, 5) - 7
    made[2, 3] += change
    return made


@dataclass(frozen=True)
class Sample:
    """How an artifact of a kind is written from a matrix, and the address at which it holds that."""

    name: str
    write: Callable[[Path, NDArray[np.float64]], None]
    address: str | None = None


def _npz(path: Path, values: NDArray[np.float64]) -> None:
    np.savez_compressed(path, values=values, other=np.arange(3))


def _columns(values: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    return {f"c{i}": values[:, i] for i in range(values.shape[1])}


def _csv(path: Path, values: NDArray[np.float64]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_columns(values))
        writer.writerows(values.tolist())


def _parquet(path: Path, values: NDArray[np.float64]) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table(_columns(values)), path, row_group_size=4)


def _hdf5(path: Path, values: NDArray[np.float64]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset("group/values", data=values, chunks=(4, 2))
        file["other"] = np.arange(3)


def _netcdf(path: Path, values: NDArray[np.float64]) -> None:
    import xarray as xr

    xr.Dataset({"values": (("y", "x"), values), "other": ("z", np.arange(3))}).to_netcdf(path)


def _zarr(path: Path, values: NDArray[np.float64]) -> None:
    import zarr

    group = zarr.open_group(path, mode="w")
    group.create_array("group/values", data=values, chunks=(4, 2))
    group.create_array("other", data=np.arange(3))


def _image(path: Path, values: NDArray[np.float64]) -> None:
    from PIL import Image

    Image.fromarray((values + 100).astype(np.uint8)).save(path)


def _torch(path: Path, values: NDArray[np.float64]) -> None:
    import pytest

    torch = pytest.importorskip("torch")
    torch.save({"values": torch.tensor(values), "bias": torch.zeros(3)}, path)


def _safetensors(path: Path, values: NDArray[np.float64]) -> None:
    write_safetensors(path, {"values": values, "bias": np.zeros(3)})


def _store(path: Path, values: NDArray[np.float64]) -> None:
    with Session(path) as session:
        session.models.add({"values": values, "bias": np.zeros(3)}, "model")
        session.compute.apply("frob_norm")


def _text(path: Path, values: NDArray[np.float64]) -> None:
    path.write_text("\n".join(map(str, values.tolist())) + "\n")


SAMPLES: dict[str, Sample] = {
    "binary": Sample("data.bin", lambda path, values: path.write_bytes(values.tobytes()) and None),
    "text": Sample("lines.txt", _text),
    "image": Sample("image.png", _image),
    "csv": Sample("table.csv", _csv, "c3"),
    "json": Sample("data.json", lambda path, values: path.write_text(json.dumps({"rows": values.tolist()})) and None),
    "yaml": Sample("data.yaml", lambda path, values: path.write_text(f"rows: {values.tolist()}\n") and None),
    "npy": Sample("array.npy", lambda path, values: np.save(path, values)),
    "npz": Sample("arrays.npz", _npz, "values"),
    "parquet": Sample("table.parquet", _parquet, "c3"),
    "hdf5": Sample("data.h5", _hdf5, "group/values"),
    "netcdf": Sample("data.nc", _netcdf, "values"),
    "zarr": Sample("data.zarr", _zarr, "group/values"),
    "torch": Sample("model.pt", _torch, "values"),
    "safetensors": Sample("model.safetensors", _safetensors, "values"),
    "weight store": Sample("store.zarr", _store, "model/values"),
}

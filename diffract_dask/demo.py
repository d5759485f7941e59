"""The main job on real weights that need no download: train a small network, analyse its checkpoints, write a report.

``diffract-dask demo`` or ``python -m diffract_dask.demo`` runs :func:`run` in the folder ``./diffract-demo``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.blas import blas_threads
from diffract_dask.report import report
from diffract_dask.session import Session
from diffract_dask.terminal import format_table
from diffract_dask.testing import write_safetensors

__all__ = ["Checkpoint", "Demo", "digits", "run", "train"]

Weights = dict[str, NDArray[np.float32]]
Pixels = NDArray[np.float32]
Labels = NDArray[np.int64]

LAYERS = {"input": (256, 64), "hidden": (128, 256), "output": (10, 128)}
"""Shape (out, in) of each layer of the network."""

BATCH, LEARNING_RATE, MOMENTUM = 64, 0.05, 0.9
STEPS = (0, 10, 30, 100, 300, 1000, 3000)
FORK_AT, FORK_STEPS, FORK_DECAY = 300, (600, 1000, 3000), 3e-3

FIELDS = (
    "frob_norm", "l2_norm", "nuclear_norm", "stable_rank", "effective_rank", "hard_rank", "esd_max", "esd_min",
    "weights_mean", "weights_std", "weights_kurtosis", "param_norm", "log_spectral_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved state of the training.

    Parameters
    ----------
    model_id : str
    step : int
    parent : str, optional
    path : Path
        A safetensors file.
    accuracy : float
        On the test images.
    weight_decay : float
    """

    model_id: str
    step: int
    parent: str | None
    path: Path
    accuracy: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Demo:
    """What :func:`run` made, and how long the parts took in seconds."""

    checkpoints: list[Checkpoint]
    store: Path
    report: Path
    training_seconds: float
    analysis_seconds: float
    report_seconds: float


def digits(test: int = 360, seed: int = 0) -> tuple[tuple[Pixels, Labels], tuple[Pixels, Labels]]:
    """Return 1797 images of handwritten digits and their labels, split at random into training and test set.

    Parameters
    ----------
    test : int
        Size of the test set.
    seed : int
        Of the split.

    Returns
    -------
    (images, labels), (images, labels)
        Training and test set; images are (n, 64), from 0 to 1.

    Notes
    -----
    Optical Recognition of Handwritten Digits (test set), E. Alpaydin and C. Kaynak 1998, UCI Machine Learning
    Repository, CC BY 4.0.

    Examples
    --------
    >>> (images, labels), _ = digits()
    >>> images.shape, labels[:3].tolist()
    ((1437, 64), [4, 9, 5])
    """
    with (files("diffract_dask") / "data" / "digits.npz").open("rb") as file, np.load(file) as stored:
        images = stored["images"].astype(np.float32) / 16
        labels = stored["labels"].astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out, rest = order[:test], order[test:]
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def initial_weights(seed: int = 0) -> Weights:
    """Return weights drawn with variance 2 / inputs (He et al. 2015), and zero biases."""
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for layer, (out, inputs) in LAYERS.items():
        weights[f"{layer}.weight"] = (rng.standard_normal((out, inputs)) * np.sqrt(2 / inputs)).astype(np.float32)
        weights[f"{layer}.bias"] = np.zeros(out, np.float32)
    return weights


def predict(weights: Weights, images: Pixels) -> tuple[list[Pixels], Pixels]:
    """Return the input of each layer and the scores (n, 10) of a network of linear layers with ReLU between them."""
    inputs, x = [], images
    for layer in LAYERS:
        inputs.append(x)
        scores = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.maximum(scores, 0)
    return inputs, scores


def gradient(weights: Weights, images: Pixels, labels: Labels) -> Weights:
    """Return the gradient of the mean cross-entropy."""
    inputs, scores = predict(weights, images)
    error = np.exp(scores - scores.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    grads: Weights = {}
    for layer, x in reversed(list(zip(LAYERS, inputs, strict=True))):
        grads[f"{layer}.weight"], grads[f"{layer}.bias"] = error.T @ x, error.sum(0)
        error = (error @ weights[f"{layer}.weight"]) * (x > 0)
    return grads


@dataclass(slots=True)
class State:
    """Weights and momentum after `step` steps: all that training needs in order to go on, or to fork."""

    step: int
    weights: Weights
    momentum: Weights

    def copy(self) -> State:
        """Return an independent copy."""
        return State(
            self.step,
            {name: w.copy() for name, w in self.weights.items()},
            {name: m.copy() for name, m in self.momentum.items()},
        )


def train(
    state: State, data: tuple[Pixels, Labels], stops: Sequence[int], *, weight_decay: float = 0.0, seed: int = 0
) -> Iterator[State]:
    """Train by stochastic gradient descent with momentum, in place; yield `state` at each of `stops`.

    Parameters
    ----------
    state : State
    data : (images, labels)
    stops : sequence of int
        Ascending numbers of steps.
    weight_decay : float
        Times the weights (not the biases) is added to the gradient.
    seed : int
        Of the batches. The batch of a step depends on the step alone, so that a fork sees the same ones.
    """
    images, labels = data
    for stop in stops:
        for step in range(state.step, stop):
            batch = np.random.default_rng([seed, step]).choice(len(labels), BATCH, replace=False)
            for name, grad in gradient(state.weights, images[batch], labels[batch]).items():
                weights, momentum = state.weights[name], state.momentum[name]
                if name.endswith(".weight"):
                    grad = grad + np.float32(weight_decay) * weights
                momentum *= np.float32(MOMENTUM)
                momentum += grad
                weights -= np.float32(LEARNING_RATE) * momentum
        state.step = stop
        yield state


def checkpoints(folder: Path, seed: int = 0) -> Iterator[Checkpoint]:
    """Train the network, and from step 300 again with weight decay; save and yield a checkpoint at each stop."""
    data, (test_images, test_labels) = digits(seed=seed)
    weights = initial_weights(seed)
    state = State(0, weights, {name: np.zeros_like(w) for name, w in weights.items()})
    fork, fork_parent = state, ""
    for run_name, stops, decay in (("base", STEPS, 0.0), ("decay", FORK_STEPS, FORK_DECAY)):
        parent: str | None = None
        if run_name == "decay":
            state, parent = fork, fork_parent
        for now in train(state, data, stops, weight_decay=decay, seed=seed):
            model_id = f"{run_name}-{now.step}"
            accuracy = float((predict(now.weights, test_images)[1].argmax(1) == test_labels).mean())
            path = write_safetensors(folder / f"{model_id}.safetensors", now.weights, {"step": str(now.step)})
            yield Checkpoint(model_id, now.step, parent, path, accuracy, decay)
            parent = model_id
            if run_name == "base" and now.step == FORK_AT:
                fork, fork_parent = now.copy(), model_id


def run(
    directory: str | Path = "diffract-demo",
    *,
    seed: int = 0,
    link: bool = False,
    echo: Callable[[str], Any] = print,
) -> Demo:
    """Train, save, add, compute, print and report.

    Parameters
    ----------
    directory : path
        Made if it does not exist. Checkpoints, store and report of an earlier run are replaced; what need not be
        computed again is not.
    seed : int
        Of the data split, the initial weights and the batches.
    link : bool
        Let the store point to the checkpoints instead of copying them.
    echo : callable
        Called with each piece of text.

    Returns
    -------
    Demo
    """
    directory = Path(directory)
    folder = directory / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    echo("Training a network (64-256-128-10) on 1437 handwritten digits, and from step 300 again with weight decay ...")
    start = perf_counter()
    with blas_threads(1):  # for matrices this small, a second thread costs more than it saves
        saved = list(checkpoints(folder, seed))
    trained = perf_counter()
    echo(f"{len(saved)} checkpoints in {folder} after {trained - start:.1f} s\n")

    store = directory / "diffract.zarr"
    with Session(store) as session:
        for point in saved:
            session.models.add(
                str(point.path),
                point.model_id,
                step=point.step,
                parent=point.parent,
                attrs={
                    "test_accuracy": point.accuracy,
                    "weight_decay": point.weight_decay,
                    "learning_rate": LEARNING_RATE,
                    "momentum": MOMENTUM,
                },
                replace=True,
                link=link,
            )
        summary = session.compute.apply(*FIELDS)
        analysed = perf_counter()
        echo(_table(session, saved))
        echo(f"\nAdded and analysed in {analysed - trained:.2f} s. {summary}")
        echo(f"Asked once more. {session.compute.apply(*FIELDS)}")
        before = perf_counter()
        page = report(session, directory / "report.html", FIELDS, title="Handwritten digits: two ways to train")
        finished = perf_counter()
    echo(f"\nReport   {page}\nStore    {store}\n\n{_next_steps(store)}")
    return Demo(saved, store, page, trained - start, analysed - trained, finished - before)


def _table(session: Session, saved: Sequence[Checkpoint]) -> str:
    dataset = session.results.dataset("stable_rank", "effective_rank")
    rows = []
    for point in saved:
        row: dict[str, Any] = {"model": point.model_id, "step": point.step, "parent": point.parent or ""}
        row["test_accuracy"] = f"{point.accuracy:.1%}"
        for field in ("stable_rank", "effective_rank"):
            for layer in LAYERS:
                value = dataset[field].sel(model_id=point.model_id, name=f"{layer}.weight")
                row[f"{field}_{layer}"] = round(float(value), 2)
        rows.append(row)
    return format_table(rows, width=110)


def _next_steps(store: Path) -> str:
    return (
        "Go on from here:\n"
        f"    diffract-dask --store {store} show stable_rank --model 'base-*'\n"
        "    python\n"
        "    >>> import xarray as xr\n"
        f"    >>> ds = xr.open_zarr({str(store)!r}, group='view')\n"
        "    >>> ds.stable_rank.sel(name='hidden.weight').to_series()"
    )


if __name__ == "__main__":
    run()

"""The same requests on a distributed client: worker threads and worker processes, disk and memory stores."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster

from diffract_dask import Session
from diffract_dask.testing import write_safetensors

FIELDS = ("stable_rank", "nuclear_norm", "weights_mean", "weights_svals", "param_norm")


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"a.weight": (40, 30), "b.weight": (40, 30), "c.weight": (16, 50), "d.weight": (300, 12)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module", params=["threads", "processes"])
def cluster(request):
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=request.param == "processes", dashboard_address=":0"
    ) as made:
        yield made


@pytest.fixture
def client(cluster):
    with Client(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def expected():
    session = Session()
    session.models.add(weights(), "m")
    session.compute.apply(*FIELDS)
    return session.results.dataset(*FIELDS)


@pytest.mark.parametrize("kind", ["memory", "copied", "linked"])
def test_agrees_with_threads(client, expected, kind, tmp_path):
    session = Session() if kind == "memory" else Session(str(tmp_path / "s.zarr"))
    model = weights()
    if kind == "linked":
        write_safetensors(tmp_path / "m.safetensors", model)
        model = tmp_path / "m.safetensors"
    session.models.add(model, "m", link=kind == "linked")
    assert session.compute.plan("stable_rank").resources.distributed
    summary = session.compute.apply(*FIELDS)
    assert summary.computed["stable_rank"] == 4
    found = session.results.dataset(*FIELDS).sel(name=expected.name)
    for field in FIELDS:
        np.testing.assert_array_equal(found[field], expected[field])
    assert session.compute.apply(*FIELDS).kernel_slices == {}


def test_notebook_kernel_and_layer_names(client, tmp_path):
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add(weights(), "m")

    @session.compute.kernel
    def top_share(weights_svals, *, k=2):
        s2 = weights_svals**2
        return s2[-k:].sum() / s2.sum()

    lazy = session.compute.lazy("top_share")
    assert {key[0].rsplit("-", 1)[0] for key in dict(lazy.top_share.data.dask)} >= {"top_share", "singular_values"}
    summary = session.compute.apply("top_share")
    assert summary.computed["top_share"] == 4
    np.testing.assert_allclose(
        lazy.compute().top_share.sel(model_id="m"), session.results.dataset("top_share").top_share.sel(model_id="m")
    )

"""diffract-core on arrays in memory; run by its own interpreter.

``python diffract_catalogue.py FIELDS REPEATS FILE …`` with fields between commas and files in npz or safetensors form,
each of which is one model.
"""

import contextlib
import importlib.metadata
import io
import json
import sys
import time
import warnings


def load(path: str) -> dict:
    """Return the matrices of a file in float32, under names that diffract-core analyses."""
    import numpy

    if path.endswith(".npz"):
        with numpy.load(path) as archive:
            arrays = {name: archive[name] for name in archive}
    else:
        from safetensors.numpy import load_file

        arrays = load_file(path)
    matrices = {name: w for name, w in arrays.items() if w.ndim == 2 and w.dtype.kind == "f"}
    return {name if name.endswith("weight") else f"{name}.weight": w for name, w in matrices.items()}


def main(fields: str, repeats: int, *paths: str) -> None:
    """Print one line of JSON with the seconds of each run."""
    import numpy
    from diffract import Session

    models = {path: load(path) for path in paths}
    wanted, seconds = fields.split(","), []
    warnings.simplefilter("ignore")
    for _ in range(repeats):
        with Session(profile="ram") as session, contextlib.redirect_stdout(io.StringIO()):
            for number, weights in enumerate(models.values()):
                session.models.add(weights, model_id=f"model-{number}")
            start = time.perf_counter()
            session.compute.apply(*wanted)
            seconds.append(time.perf_counter() - start)
    versions = {"diffract-core": importlib.metadata.version("diffract-core"), "numpy": numpy.__version__}
    count = sum(map(len, models.values()))
    print(json.dumps({"seconds": seconds, "matrices": count, "fields": len(wanted), "versions": versions}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

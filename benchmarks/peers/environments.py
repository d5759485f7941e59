"""Make the environments of the peers, each in its own folder, from pinned versions; what is there is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A tool to compare with: the oldest Python that runs it and what to install.

    `local` is installed only from a wheel on this machine (pip's find-links), since an index might serve a build of
    several gigabytes; where there is none, the peer is left out.
    """

    name: str
    python: tuple[int, int]
    requirements: tuple[str, ...]
    local: str = ""


PEERS = {
    "diffract": Peer("diffract", (3, 12), ("diffract-core==0.3.1", "powerlaw==1.5", "safetensors")),
    "weightwatcher": Peer(
        "weightwatcher", (3, 11), ("weightwatcher==0.7.7", "safetensors", "setuptools<81"), "torch==2.13.0"
    ),
}


def interpreters() -> Iterator[str]:
    """Yield Python interpreters to try: ``$PEER_PYTHON``, this one, those on the path, those of pyenv."""
    if "PEER_PYTHON" in os.environ:
        yield os.environ["PEER_PYTHON"]
    yield sys.executable
    for minor in (12, 13, 11, 14):
        found = shutil.which(f"python3.{minor}")
        if found:
            yield found
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False).stdout.strip()
        yield from (str(path) for path in sorted(Path(root).glob("versions/3.*/bin/python")) if root)


def find(oldest: tuple[int, int]) -> str | None:
    """Return an interpreter at least as new as `oldest`, the nearest first; None where there is none."""
    code = "import sys, venv; print(*sys.version_info[:2])"
    usable = []
    for candidate in interpreters():
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            version = tuple(int(x) for x in done.stdout.split())
            if version >= oldest:
                usable.append((version, candidate))
    return min(usable)[1] if usable else None


def python_of(name: str, folder: Path) -> tuple[str | None, str]:
    """Return the interpreter of a peer's environment, made if missing, or None and the reason."""
    peer = PEERS[name]
    python = folder / name / "bin" / "python"
    if (folder / name / ".ready").is_file() and python.exists():
        return str(python), ""
    base = find(peer.python)
    if base is None:
        return None, f"no Python {'.'.join(map(str, peer.python))} or newer (name one in PEER_PYTHON)"
    print(f"making {folder / name} …", file=sys.stderr, flush=True)
    commands = [[base, "-m", "venv", "--clear", str(folder / name)]]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if peer.local:
        commands.append([*pip, "--no-index", "--no-deps", peer.local])
    commands.append([*pip, *peer.requirements, *([peer.local] if peer.local else [])])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return None, f"{' '.join(command[-4:])}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}"
    (folder / name / ".ready").touch()
    return str(python), ""

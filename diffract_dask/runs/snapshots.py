"""The sources behind the runs, in a git repository: ``<root>/_scripts``."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from filelock import FileLock

from diffract_dask.runs import encoding
from diffract_dask.runs.variants import registry

__all__ = ["Snapshot", "repository_state", "show", "take"]

SCRIPTS = "_scripts"
_TIMEOUT = 60
_SETTINGS = (
    "safe.directory=*",  # the folder may belong to somebody else
    "user.name=diffract_dask",
    "user.email=diffract_dask@localhost",
    "commit.gpgsign=false",
    "core.hooksPath=/dev/null",
    "core.autocrlf=false",
    "init.defaultBranch=main",
    "gc.auto=0",
)


class Snapshot:
    """A commit and where in it each module lies.

    Attributes
    ----------
    commit : str or None
        None where git is missing or failed; `warning` says so.
    sources : dict
        Path by module.
    warning : str or None
    """

    def __init__(self, commit: str | None, sources: dict[str, str], warning: str | None = None) -> None:
        self.commit = commit
        self.sources = sources
        self.warning = warning


def git(folder: Path | str, *arguments: str, text: str | None = None, check: bool = True) -> str:
    """Run git in a folder and return what it prints; settings of the user and the surroundings do not matter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    kept |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    done = subprocess.run(
        ["git", "--literal-pathspecs", *settings, *arguments],
        cwd=folder,
        env=kept,
        input=text,
        capture_output=True,
        text=True,
        encoding="utf8",
        errors="replace",
        timeout=_TIMEOUT,
        check=False,
    )
    if check and done.returncode:
        raise subprocess.SubprocessError(f"git {arguments[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout


_taken: dict[tuple[str, str], str] = {}  # what this process knows to be committed


def _reference(commit: str) -> str:
    """Return the reference that keeps a commit in reach when two roots are copied over each other."""
    return f"refs/snapshots/{commit[:16]}"


def take(root: Path, files: Mapping[str, str], message: str) -> Snapshot:
    """Commit source files, by module, if they changed; return the commit that holds them."""
    sources = {module: f"{module.replace('.', '/')}.py" for module in files}
    try:
        contents = {
            sources[module]: registry.source_text(module) or Path(file).read_bytes() for module, file in files.items()
        }
    except OSError as error:
        return Snapshot(None, {}, f"no snapshot of the sources: {error}")
    if not contents:
        return Snapshot(None, {}, "no snapshot of the sources: they are in no file")
    if shutil.which("git") is None:
        return Snapshot(None, {}, "no snapshot of the sources: git is not installed")
    folder = root / SCRIPTS
    digest = encoding.sha256_of(f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(contents.items()))
    before = _taken.get((str(root), digest))
    if before is not None and (folder / ".git" / _reference(before)).exists():
        return Snapshot(before, sources)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{SCRIPTS}.lock", timeout=_TIMEOUT, thread_local=False):
            commit = _taken[str(root), digest] = _commit(folder, contents, message)
            return Snapshot(commit, sources)
    except (OSError, subprocess.SubprocessError) as error:
        return Snapshot(None, {}, f"no snapshot of the sources: {error}")


def _commit(folder: Path, contents: Mapping[str, bytes], message: str) -> str:
    if not (folder / ".git" / "HEAD").exists():
        git(folder, "init", "-q")
    _unlock(folder)
    for name, data in contents.items():
        path = folder.joinpath(*PurePosixPath(name).parts)
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    names = "\0".join(contents) + "\0"
    git(folder, "add", "-f", "--pathspec-from-file=-", "--pathspec-file-nul", text=names)
    head = git(folder, "rev-parse", "-q", "--verify", "HEAD", check=False).strip()
    if head and not git(folder, "diff", "--cached", "--name-only", "HEAD").strip():
        return head
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    commit = git(folder, "rev-parse", "HEAD").strip()
    git(folder, "update-ref", _reference(commit), commit)
    return commit


def _unlock(folder: Path) -> None:
    """Remove what a killed git left; whoever holds our lock is alone."""
    for name in ("index.lock", "HEAD.lock", "refs/heads/main.lock"):
        (folder / ".git" / name).unlink(missing_ok=True)


def show(root: Path, commit: str | None, path: str | None) -> str | None:
    """Return a file of a snapshot as text; None if it is not there."""
    if not commit or not path or not (root / SCRIPTS / ".git").exists():
        return None
    try:
        return git(root / SCRIPTS, "show", f"{commit}:{path}")
    except (OSError, subprocess.SubprocessError):
        return None


def repository_state(file: str | None) -> tuple[str | None, bool | None]:
    """Return the commit of the repository that a file lies in, and whether it has uncommitted changes."""
    folder = Path(file or os.getcwd()).absolute().parent if file else Path.cwd()
    if shutil.which("git") is None or not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None, None
    try:
        head = git(folder, "rev-parse", "HEAD").strip()
        return head, bool(git(folder, "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        return None, None


def fetch(root: Path, other: Path) -> None:
    """Bring the snapshots of another root into this one's repository."""
    if not (other / SCRIPTS / ".git").exists() or shutil.which("git") is None:
        return
    folder = root / SCRIPTS
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{SCRIPTS}.lock", timeout=_TIMEOUT, thread_local=False):
        if not (folder / ".git" / "HEAD").exists():
            git(folder, "init", "-q")
        refs: Sequence[str] = ("+refs/snapshots/*:refs/snapshots/*", f"+HEAD:refs/merged/{_tag(other)}")
        git(folder, "fetch", "-q", "--no-tags", str((other / SCRIPTS).absolute()), *refs)


def _tag(other: Path) -> str:
    return encoding.sha256_of([str(other)])[:16]

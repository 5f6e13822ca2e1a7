"""Downloads packages with apt-get and pip, which take mirrors from their own settings, and compares their hashes."""

from __future__ import annotations

import errno
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.corpus.errors import Failed
from bench.corpus.packages import Package
from bench.corpus.progress import say


def download(packages: Sequence[Package], folder: Path) -> dict[str, Path]:
    """Download the packages that are not in a folder yet.

    Returns:
        The archive of each package, by its hash. The names of the files do not matter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = hash_files(folder)
    missing = [package for package in packages if package.sha256 not in found]
    say(f"{len(packages)} packages, of which {len(missing)} must be downloaded")
    fetchers: dict[str, Callable[[Sequence[Package], Path], None]] = {"deb": fetch_debs, "pip": fetch_wheels}
    for registry, fetch in fetchers.items():
        wanted = [package for package in missing if package.registry == registry]
        for start in range(0, len(wanted), 16):
            fetch(wanted[start : start + 16], folder)
            say(f"downloaded {start + len(wanted[start : start + 16])} of {len(wanted)} {registry} packages")
    if missing:
        found = hash_files(folder)
    for package in packages:
        if package.sha256 not in found:
            raise Failed(f"the archive of {package.name} {package.version} does not have the expected hash")
    return found


def hash_files(folder: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                found[hashlib.file_digest(file, "sha256").hexdigest()] = path
    return found


def fetch_debs(packages: Sequence[Package], folder: Path) -> None:
    names = [f"{package.name}={package.version}" for package in packages]
    run_tool(["apt-get", "download", "-q", *names], folder, "Debian 12 (bookworm) must be in apt's sources")


def fetch_wheels(packages: Sequence[Package], folder: Path) -> None:
    """Download wheels. For a source distribution, pip would execute its build script."""
    lines = [f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n" for package in packages]
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(lines))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    try:
        run_tool([*command, "-d", ".", "-r", wanted.name], folder, "pip must reach a package index")
    finally:
        wanted.unlink()


def run_tool(command: Sequence[str], folder: Path, advice: str) -> None:
    tool = "pip" if "pip" in command else command[0]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise Failed(f"{tool} is not installed, and the packages are downloaded with it") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if re.match(r"(?i)e(rr|rror)?:", line)]
        reason = re.sub(r"\S+://\S+", "...", lines[0]) if lines else f"exit code {done.returncode}"
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, "no space left")
        raise Failed(f"{tool} could not download a package ({reason.strip()}); {advice}")

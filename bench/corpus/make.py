"""Makes the corpus: python -m bench.corpus.make FOLDER

usage: python -m bench.corpus.make FOLDER [--size 220MB] [--archives FOLDER] [--jobs N]
       python -m bench.corpus.make --list

FOLDER gets train-*.jsonl and eval.jsonl ("text", "source", "path", "kind"), about.json and README.txt. It appears when
it is complete; an interrupted run leaves nothing. --archives keeps the downloaded packages for the next time. The hash
of a corpus of the default size is compared with the one below; the exit code is 1 if it differs.

The Debian packages need the main component of Debian 12 (bookworm) in apt's sources.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.corpus.dedupe import dedupe
from bench.corpus.documents import read_packages
from bench.corpus.download import download
from bench.corpus.errors import Failed, run_command
from bench.corpus.packages import PACKAGES, Package
from bench.corpus.progress import parse_count, say
from bench.corpus.write import select_documents, write_corpus

DEFAULT_BYTES = 220_000_000
EXPECTED_SHA256 = "7c210c743442b0761240c3b989acc458173b5d804d9e794ec105a49c3411ff65"
"""The hash of the documents of a corpus of the default size, with the packages of packages.py."""
DISK_BYTES = 2_000_000_000
"""Free space that is needed: archives, and the corpus."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="folder to make")
    parser.add_argument("--size", type=parse_count, default=DEFAULT_BYTES, help="bytes of text (default: 220MB)")
    parser.add_argument("--archives", type=Path, help="folder with downloaded packages; missing ones are added")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that read packages")
    parser.add_argument("--list", action="store_true", help="list the packages and exit")
    options = parser.parse_args(arguments)
    if options.list:
        for package in PACKAGES:
            print(f"{package.registry:4} {package.name:32} {package.version}")
        return 0
    if options.folder is None:
        parser.error("give the folder to make")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give 1 or more processes")
    return run_command("make", lambda: make_and_compare(options))


def make_and_compare(options: argparse.Namespace) -> int:
    """Make the corpus and say whether it has the expected hash."""
    about = make(options.folder, PACKAGES, options.size, options.archives, options.jobs)
    say(f"sha256 {about['sha256']}")
    if options.size != DEFAULT_BYTES:
        say(f"not compared: only the hash of a corpus of {DEFAULT_BYTES} bytes is known")
        return 0
    is_equal = about["sha256"] == EXPECTED_SHA256
    say("the hash is the expected one" if is_equal else f"the hash differs from the expected one, {EXPECTED_SHA256}")
    return 0 if is_equal else 1


def make(folder: Path, packages: Sequence[Package], size: int, archives: Path | None, jobs: int) -> dict[str, Any]:
    """Make the corpus in a temporary folder beside FOLDER, and rename that when it is complete.

    Returns:
        What about.json says.
    """
    if folder.exists():
        raise Failed(f"{folder} exists already; delete it or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < DISK_BYTES:
        raise Failed(f"{folder.parent} has less than {DISK_BYTES / 1e9:.0f} GB of free space; free some or use another")
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    unfinished.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            if archives is None:
                archives = unfinished / "archives"
                stack.callback(shutil.rmtree, archives)
            found = download(packages, archives)
            documents, counts = read_packages(packages, found, jobs)
            documents = dedupe(documents, counts, jobs)
            documents = select_documents(documents, size, counts)
        about = write_corpus(documents, packages, counts, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    say(
        f"{folder}: {about['documents']} documents, {about['bytes'] / 1e6:.1f} MB of text, of which"
        f" {about['prose_share']:.0%} prose, {about['eval_documents']} documents for evaluation"
    )
    return about


if __name__ == "__main__":
    sys.exit(main())

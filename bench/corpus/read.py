"""Reads the files of .deb and .whl archives in memory. No member is written to disk, and nothing is executed.

Members with a path that leaves the archive, links, devices and very large members are refused.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bench.corpus.errors import Dropped, Failed
from bench.corpus.paths import SKIPPED_PATHS, classify

MEMBER_BYTES = 64 << 20
"""Largest member of an archive, unpacked. The largest dictionary has 40 MB."""
ARCHIVE_BYTES = 2 << 30
"""Largest sum of the members that are read from one archive."""
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError, RuntimeError)
"""What the standard library raises for archives that are damaged, encrypted or compressed in an unknown way."""


def read_archive(archive: Path) -> Iterator[tuple[str, bytes | Dropped]]:
    """Yield the members of a .deb or .whl whose type is known, without writing them. Refused ones have a reason."""
    left = ARCHIVE_BYTES
    try:
        with archive.open("rb") as file:
            is_deb = file.read(8) == b"!<arch>\n"
            file.seek(0)
            for path, content in read_deb(file) if is_deb else read_zip(file):
                if isinstance(content, bytes) and (left := left - len(content)) < 0:
                    raise Failed(f"{archive.name} unpacks to more than {ARCHIVE_BYTES >> 30} GB; not read further")
                yield path, content
    except DAMAGED as error:
        raise Failed(f"{archive.name} is damaged ({error}); delete it and start again") from error


def read_deb(file: IO[bytes]) -> Iterator[tuple[str, bytes | Dropped]]:
    """A .deb is an `ar` archive: a header of 60 bytes and a size for each member, one of which is data.tar.*."""
    file.seek(8)
    while header := file.read(60):
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        if size < 0:
            raise ValueError(f"a member of {size} bytes")
        if name.startswith("data.tar"):
            yield from read_tar(file)
            return
        file.seek(size + size % 2, io.SEEK_CUR)


def read_tar(file: IO[bytes], is_inner: bool = False) -> Iterator[tuple[str, bytes | Dropped]]:
    """A tar archive is read as a stream. One that is a member of it (a package of source code) is read as well."""
    kind = {b"\xfd7zXZ": "r|xz", b"\x1f\x8b": "r|gz", b"BZh": "r|bz2"}
    start = file.tell()
    magic = file.read(5)
    file.seek(start)
    mode = next((mode for begin, mode in kind.items() if magic.startswith(begin)), "r|")
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for member in archive:
            path = member.name.removeprefix("./")
            if not member.isreg() or not (classify(path) or (is_tar(path) and not is_inner)):
                continue
            if reason := refuse(path, member.size):
                yield path, reason
                continue
            stream = archive.extractfile(member)
            assert stream is not None  # of a regular file
            content = stream.read()
            if is_tar(path):
                yield from read_tar(io.BytesIO(content), is_inner=True)
            else:
                yield path, content


def read_zip(file: IO[bytes]) -> Iterator[tuple[str, bytes | Dropped]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            is_link = member.external_attr >> 28 == 0o12
            if member.is_dir() or is_link or not classify(member.filename):
                continue
            if reason := refuse(member.filename, member.file_size):
                yield member.filename, reason
                continue
            with archive.open(member) as stream:
                yield member.filename, read_limited(stream)


def is_tar(path: str) -> bool:
    return path.endswith((".tar.xz", ".tar.gz", ".tar.bz2"))


def refuse(path: str, size: int) -> Dropped | None:
    """Return why a member is not read, if so: by its name, before it is unpacked."""
    if path.startswith("/") or ".." in path.split("/") or "\\" in path:
        return Dropped("unsafe path")
    if size > MEMBER_BYTES:
        return Dropped("too large")
    return Dropped("path") if SKIPPED_PATHS.search(path) else None


def read_limited(stream: IO[bytes] | gzip.GzipFile) -> bytes | Dropped:
    """Read a compressed stream, whose header may give a wrong size."""
    content = stream.read(MEMBER_BYTES + 1)
    return content if len(content) <= MEMBER_BYTES else Dropped("too large")

"""Hash the files of a dump."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phosd.engine.image.manifest import FileDigest
from phosd.engine.image.private_files import file_digest


def digests(folder: Path) -> tuple[FileDigest, ...]:
    """Return the digest of every file below ``folder``."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(max_workers=8) as pool:
        return tuple(pool.map(lambda path: _digest(path, folder), paths))


def _digest(path: Path, folder: Path) -> FileDigest:
    with path.open("rb") as file:
        sha256 = file_digest(file.fileno())
    return FileDigest(str(path.relative_to(folder)), path.stat().st_size, sha256)

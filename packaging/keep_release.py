"""Keep what a release runs on, for the tests of upgrades: Python code and native libraries.

    python packaging/keep_release.py COMMIT FILE.tar.xz

The libraries are built from the commit and stripped. The software GPU is left out: like a driver,
it is the same before and after an upgrade. Run it in a checkout that is set up (`make setup`).
"""

import argparse
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
LIBRARIES = ("phos_hook", "phos_board", "phos_digest", "phos_pages", "phos_criu")
KINDS = (".py", ".ptx", ".so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        run("git", "-C", HERE, "worktree", "add", "--detach", tree, arguments.commit)
        try:
            build(tree)
            pack(tree / "phosd", arguments.file)
        finally:
            run("git", "-C", HERE, "worktree", "remove", "--force", tree)
    print(f"{arguments.file}: {arguments.file.stat().st_size} bytes")


def build(tree: Path) -> None:
    """Build the libraries into the package, stripped."""
    tools = Path(sys.executable).parent
    folder = tree / "build"
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    run(
        tools / "cmake",
        "-S",
        tree,
        "-B",
        folder,
        "-G",
        "Ninja",
        ninja,
        python,
        "-DPHOS_NATIVE_TESTS=OFF",
    )
    run(tools / "cmake", "--build", folder, "--target", *LIBRARIES)
    for library in (tree / "phosd/native").rglob("*.so"):
        run("strip", library)


def pack(package: Path, target: Path) -> None:
    """Pack the package with the same bytes for the same content."""
    with lzma.open(target, "wb", preset=9) as file, tarfile.open(fileobj=file, mode="w") as packed:
        for path in sorted(package.rglob("*")):
            if path.suffix in KINDS and "tests" not in path.relative_to(package).parts:
                packed.add(path, Path("phosd") / path.relative_to(package), filter=anonymous)


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who has packed the file, and when."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.name.endswith(".so") else 0o644
    return entry


def run(*words: str | Path) -> None:
    subprocess.run([*map(str, words)], check=True, stdout=sys.stderr, env=os.environ)


if __name__ == "__main__":
    main()

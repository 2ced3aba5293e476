"""Build ``phosd_<version>_<architecture>.oci.tar``: phosd as an OCI image, from its Debian package.

The image has one folder, ``/usr/lib/phos``, as the package installs it, with a Python of its own:
``phosd-from-image`` copies it to the host, which may have none, and phosd runs there
(docs/operate/image.md). Python and its libraries are those of the Debian that the package is for.
Needs the package (``make deb``), buildah, patchelf and access to the archive. SOURCE_DATE_EPOCH, or
else the last commit, is the time of everything in the image.
"""

import argparse
import compileall
import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import deb_copyright
from build_deb import HOME, IN_PROGRAMS, LAUNCHER, ROOT, project_version, put
from bundled import run
from install_criu import (
    PrivateApt,
    debian_archive,
    os_release,
    packed_files,
    use_libraries,
    write_origins,
)

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
RUNTIME = HOME / "runtime"
_LIBRARIES = ("usr/lib/*-linux-gnu/*.so*", "lib/*-linux-gnu/*.so*")
_UNUSED = {
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"),
    "sitecustomize.py",  # a link into /etc
}
"""Parts of Python's own library that phosd does not import."""
_ON_HOSTS = ("usr/share/dbus-1/system.d", "usr/share/polkit-1/actions")
"""What the image has besides ``HOME``, which goes to the host, too."""
_PROGRAMS = {
    "phosd-from-image": "phosd.engine.system.from_image",
    "phosd": "phosd.service.main",
    "phos": "phosd.cli.main",
    "phos-tui": "phosd.tui.main",
}


def add_runtime(root: Path, scratch: Path) -> list[deb_copyright.Component]:
    """Add Python, and the libraries that it, phosd's modules and libraries need. Returns whose
    these are.
    """
    apt = PrivateApt(scratch / "apt", debian_archive(), os_release()["VERSION_CODENAME"])
    apt.update()
    packages = [*apt.download(PYTHON), *apt.download("libstdc++6")]
    unpacked = scratch / "unpacked"
    for package in packages:
        run(["dpkg-deb", "--extract", package, unpacked], f"unpacking {package.name}")
    taken = {unpacked / f"usr/bin/{PYTHON}": f"bin/{PYTHON}"}
    library = unpacked / "usr/lib" / PYTHON
    for path in library.rglob("*"):
        inside = path.relative_to(library)
        if not path.is_dir() and inside.parts[0] not in _UNUSED | {"__pycache__"}:
            taken[path] = f"lib/{PYTHON}/{inside}"
    known = {path.name: path for each in _LIBRARIES for path in unpacked.glob(each)}
    for path in needed([*taken, *(root / HOME).rglob("*.so*")], known):
        taken[path] = f"lib/{path.name}"
    runtime = root / RUNTIME
    for path, place in taken.items():
        (runtime / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, runtime / place)
    bind(runtime)
    origins = scratch / "origins"
    write_origins(
        origins,
        {
            package: sorted(
                taken[path] for path in packed_files(package, unpacked) if path in taken
            )
            for package in dict.fromkeys(packages)
        },
        unpacked,
    )
    return [*deb_copyright.of_debian(origins, str(RUNTIME))]


def needed(first: Sequence[Path], known: dict[str, Path]) -> Iterator[Path]:
    """Yield those of the ``known`` libraries that files, and these themselves, are linked to."""
    left = [path for path in first if path.is_file() and _is_elf(path)]
    seen: set[str] = set()
    while left:
        told = run(["patchelf", "--print-needed", left.pop()], "reading a library")
        for name in set(told.split()) & known.keys() - seen:
            seen.add(name)
            left.append(known[name])
            yield known[name]


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def bind(runtime: Path) -> None:
    """Make Python use the loader and the libraries beside it, wherever it runs."""
    (loader,) = (runtime / "lib").glob("ld-linux*.so.*")
    here = Path("/") / RUNTIME / "lib"
    use_libraries(runtime / "bin" / PYTHON, here / loader.name, str(here))
    (runtime / "bin/python3").symlink_to(PYTHON)


def add_programs(root: Path) -> None:
    """Add the programs, which run with the image's own Python also on the host."""
    for name, module in _PROGRAMS.items():
        text = LAUNCHER.format(home=HOME, module=module)
        own = text.replace("/usr/bin/python3", f"/{RUNTIME}/bin/python3", 1)
        put(root / HOME / "bin" / name, own, 0o755)


def keep_in_programs(root: Path) -> None:
    """Put what programs load where an upgrade does not replace it, as the package's postinst."""
    home = root / HOME
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(home)}\n"
        for path in (home / "shipped").rglob("*")
        if path.is_file()
    ]
    content = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]
    (home / "kept").mkdir()
    (home / "shipped").rename(home / "kept" / content)
    for name in IN_PROGRAMS:
        (home / name).symlink_to(f"kept/{content}/{name}")


def compile_python(root: Path) -> None:
    """Compile all modules: phosd may not write where they are installed."""
    for folder in (HOME / "python", RUNTIME / "lib" / PYTHON):
        done = compileall.compile_dir(
            root / folder,
            quiet=1,
            stripdir=str(root),
            prependdir="/",
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        if not done:
            sys.exit(f"a module of {folder} could not be compiled; the output names it")


def digest(folder: Path) -> str:
    """Return what tells two trees apart: names, modes and content."""
    told = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = b"" if path.is_dir() else path.read_bytes()
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        told.update(f"{path.relative_to(folder)}\0{mode:o}\0{len(content)}\0".encode() + content)
    return told.hexdigest()


def make_tree(package: Path, root: Path, scratch: Path) -> None:
    """Make the file system of the image from the package."""
    whole = scratch / "package"
    run(["dpkg-deb", "--extract", package, whole], f"unpacking {package.name}")
    for part in (HOME, *map(Path, _ON_HOSTS)):
        shutil.copytree(whole / part, root / part, symlinks=True)
    whose = add_runtime(root, scratch)
    terms = "usr/share/doc/phosd/copyright"
    put(root / terms, deb_copyright.added((whole / terms).read_text(), whose))
    add_programs(root)
    keep_in_programs(root)
    compile_python(root)
    put(root / HOME / "image", f"{project_version()} {digest(root / HOME)}\n")


def commit(root: Path, image: Path, name: str, version: str, epoch: str, scratch: Path) -> None:
    """Write the image with this file system as an OCI archive, by a storage of its own."""
    folders = [f"--root={scratch / 'storage'}", f"--runroot={scratch / 'running'}"]
    buildah = ["buildah", *folders, "--storage-driver=vfs"]
    container = run([*buildah, "from", "scratch"], "beginning an image").strip()
    run([*buildah, "copy", "--quiet", container, root, "/"], "filling the image")
    labels = {
        "title": "phosd",
        "description": "checkpoint, restore and move GPU processes",
        "version": version,
        "licenses": "Apache-2.0 AND others, see /usr/share/doc/phosd/copyright",
        "base.name": "scratch",
    }
    told = [f"--label=org.opencontainers.image.{key}={value}" for key, value in labels.items()]
    entry = f'["/{HOME}/bin/phosd-from-image"]'
    run(
        [*buildah, "config", *told, "--cmd=", f"--entrypoint={entry}", container],
        "describing the image",
    )
    target = f"oci-archive:{image}:{name}"
    line = ["commit", "--quiet", "--rm", "--disable-compression=false", f"--timestamp={epoch}"]
    run([*buildah, *line, container, target], "writing the image")


def time_of_everything() -> str:
    """Return the time of everything in the image, in seconds since 1970."""
    if told := os.environ.get("SOURCE_DATE_EPOCH"):
        return told
    return run(["git", "log", "-1", "--format=%ct"], "asking for the time of the commit").strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build", metavar="DIR")
    parser.add_argument("package", type=Path, help="the Debian package")
    args = parser.parse_args()
    os.umask(0o022)
    fields = ["dpkg-deb", "--field", args.package, "Version", "Architecture"]
    told = dict(re.findall(r"(\w+): (\S+)", run(fields, "reading the package")))
    version, architecture = told["Version"], told["Architecture"]
    image = args.output.resolve() / f"phosd_{version}_{architecture}.oci.tar"
    name = f"localhost/phosd:{version.replace('~', '-')}"
    with tempfile.TemporaryDirectory(prefix="image-", dir=args.output) as folder:
        scratch = Path(folder)
        make_tree(args.package, scratch / "root", scratch)
        image.unlink(missing_ok=True)
        commit(scratch / "root", image, name, version, time_of_everything(), scratch)
    print(f"{image} ({name})")


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(f"the image could not be built: {error}")

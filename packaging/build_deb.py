"""Build ``phosd_<version>_<architecture>.deb``: everything that a node needs, in one package.

The package is for one release, this machine's or another (``--suite``, see ``deb_suites.py``), and
depends on the Python there. phosd's imports are bundled, in the versions installed for the Python
here, since those were tested.
The environment variables DEBFULLNAME and DEBEMAIL name who maintains it, that is distributes it.
Needs the native build (``make build``), patchelf and, the first time, access to CRIU's archive and
the package index.
"""

import argparse
import fnmatch
import gzip
import hashlib
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

import deb_copyright
from bundled import bundled, run
from deb_suites import OTHERS, Suite, own_glibc, own_suite, require_fit

ROOT = Path(__file__).parents[1]
HOME = Path("usr/lib/phos")
"""Folder of the package's own files; ``phosd.engine.system.native`` and ``criu`` look there."""

IN_PROGRAMS = ("libphos_hook.so", "libphos_term.so", "softgpu")
"""Files that are loaded into users' programs. These must be able to map the same files as long as
they run, and again after a restore, so an upgrade must keep the old version. The package therefore
only ships them in ``shipped``, and the maintainer scripts copy each version to a place named by its
content.
"""

SCHEMAS = "usr/share/phos"
"""The schemas of what `phos --json` prints, and of phosd.toml, whose first line names it."""
UNITS = "usr/lib/systemd/system"
SEEN = "run-phos-hook.mount"
"""Programs in pid namespaces of their own see a folder of it for as long as they live: a new one in
its place would be another. It stays until the package is purged.
"""
PLACES = (
    ("org.phos.conf", "usr/share/dbus-1/system.d"),
    ("org.phos.service", "usr/share/dbus-1/system-services"),
    ("*.policy", "usr/share/polkit-1/actions"),
    ("*.rules", "usr/share/polkit-1/rules.d"),
    ("*sysusers*.conf", "usr/lib/sysusers.d"),
    ("*tmpfiles*.conf", "usr/lib/tmpfiles.d"),
    ("*.catalog", "usr/lib/systemd/catalog"),
    *(
        (f"*.{kind}", UNITS)
        for kind in ("service", "socket", "mount", "slice", "target", "timer", "path")
    ),
)
"""Destinations of the files of ``systemd/``: the first matching pattern applies."""

FOR_OTHERS = (
    ("phosd/include/phos.h", "usr/include"),
    ("packaging/monitoring/*", "usr/share/phos/monitoring"),
)
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions",
    "zsh": "usr/share/zsh/vendor-completions",
    "fish": "usr/share/fish/vendor_completions.d",
}

TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "NOTICE")
SCRIPTS = ("postinst", "prerm", "postrm")
"""The files of ``packaging/debian`` that dpkg runs."""

FOR_TESTS = Path("phosd/engine/analysis/reference")
"""The model that tests compare the hook with."""
MAINTAINER = ("the phosd developers", "phosd@phosd.invalid")
"""Without DEBFULLNAME and DEBEMAIL: nobody who can be written to, as RFC 2606 keeps `.invalid`."""

UNUSED = (
    *("pip", "pip-*", "setuptools*", "pkg_resources", "_distutils_hack", "bin", "*.pth"),
    "example.py",  # of nvidia-ml-py
)
"""Parts of the bundled packages that only serve their own command lines, or nothing."""
SOURCES = (".cpp", ".h", ".pxd", ".pxi", ".pyx", ".in")

LAUNCHER = """\
#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "/{home}/python")
from {module} import main

sys.exit(main())
"""

CONTROL = """\
Package: phosd
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Section: admin
Priority: optional
Depends: {depends}
Recommends: polkitd, openssh-client, iptables
Suggests: bash-completion, python3-fsspec, python3-s3fs
Installed-Size: {kilobytes}
Description: checkpoint, restore and move GPU processes
 phosd saves a running GPU program to disk, brings it back after it was killed,
 and does so without the program's help. This package has the daemon (phosd),
 the command line (phos), the hook that programs are started under, and a CRIU
 of its own. A GPU needs the NVIDIA driver r580 or newer; without one, programs
 can be tried on a software GPU.
"""


def add_python(root: Path, cache: Path, suite: Suite) -> None:
    """Add phosd and its imports. The maintainer scripts compile them where they are installed."""
    folder = root / HOME / "python"
    shutil.copytree(
        bundled(cache, suite), folder, ignore=shutil.ignore_patterns(*UNUSED, "__pycache__")
    )
    for path in folder.rglob("*"):
        if path.suffix in SOURCES:
            path.unlink()
    for inside in own_files():
        put(folder / inside, (ROOT / inside).read_bytes())


def own_files() -> list[Path]:
    """Return what phosd runs of the checkout, beside its libraries."""
    found = [path.relative_to(ROOT) for path in (ROOT / "phosd").rglob("*")]
    return [
        path
        for path in found
        if path.suffix in (".py", ".pyi", ".typed", ".ptx", ".cu")
        and "native" not in path.parts
        and FOR_TESTS not in path.parents
    ]


def add_native(root: Path, build: Path, cmake: Path) -> None:
    """Add the hook, the software GPU and the other libraries of the native build, stripped."""
    scratch = root / "native"
    run(
        [cmake, "--install", build, "--strip", "--prefix", scratch],
        f"installing the native build of {build} (`make build` makes it)",
    )
    (root / HOME / "shipped").mkdir(parents=True)
    for path in (scratch / "phosd/native").iterdir():
        folder = root / HOME / ("shipped" if path.name in IN_PROGRAMS else "")
        shutil.move(path, folder / path.name)
    shutil.rmtree(scratch)


def add_criu(root: Path, cache: Path) -> Path:
    """Add CRIU. Returns the folder that it was fetched into, which tells whose its files are."""
    home = HOME / "criu"
    script = ROOT / "packaging/install_criu.py"
    fetched = cache / f"criu-{hashlib.sha256(script.read_bytes()).hexdigest()[:16]}"
    for old in cache.glob("criu*"):
        if old != fetched:
            shutil.rmtree(old)
    run([sys.executable, script, fetched, "--home", Path("/") / home], "fetching CRIU")
    unused = shutil.ignore_patterns("packages.json", "copyright")
    shutil.copytree(fetched, root / home, symlinks=True, ignore=unused)
    return fetched


def add_programs(root: Path) -> None:
    """Add ``/usr/bin/phos`` and the others, isolated from environment variables and users'
    folders.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, entry in project["scripts"].items():
        module, _, _ = entry.partition(":")
        put(root / "usr/bin" / name, LAUNCHER.format(home=HOME, module=module), 0o755)


def add_for_others(root: Path) -> None:
    """Add what C programs include, and what Prometheus and Grafana are given."""
    for place, path in [(place, path) for found, place in FOR_OTHERS for path in ROOT.glob(found)]:
        put(root / place / path.name, path.read_bytes())


def add_units(root: Path) -> dict[str, str]:
    """Add the files of ``systemd/``. Returns, for the maintainer scripts, patterns of all ``UNITS``
    but that which programs see (:data:`SEEN`), and the names of those to be ``ENABLED``.
    """
    units, enabled = [], []
    for path in sorted((ROOT / "systemd").iterdir()):
        fitting = [place for pattern, place in PLACES if fnmatch.fnmatch(path.name, pattern)]
        if not fitting:
            sys.exit(f"{path}: this kind of file has no place in the package (see PLACES)")
        put(root / fitting[0] / path.name, path.read_bytes())
        if fitting[0] == UNITS and path.name != SEEN:
            units.append(f"'{path.name.replace('@.', '@*.')}'")
            if "[Install]" in path.read_text():
                enabled.append(path.name)
    return {"UNITS": " ".join(units), "ENABLED": " ".join(enabled)}


def add_documents(root: Path) -> None:
    """Add documentation, examples, man pages, and completions where shells look for them."""
    documents = root / "usr/share/doc/phosd"
    pages = [
        path for folder in ("docs", "deploy", "examples") for path in (ROOT / folder).rglob("*")
    ]
    # Keep the layout of a checkout: the pages link to each other.
    for path in (*(ROOT / name for name in TEXTS), *pages):
        if path.is_file() and path.suffix != ".in":
            put(documents / path.relative_to(ROOT), path.read_bytes())
    made = root / "made"
    run([sys.executable, ROOT / "packaging/make_docs.py", made], "writing the man pages")
    for path in (made / "man").iterdir():
        page = root / f"usr/share/man/man{path.suffix[1:]}" / f"{path.name}.gz"
        put(page, gzip.compress(path.read_bytes(), mtime=0))
    for path in (made / "interfaces").iterdir():
        put(root / "usr/share/dbus-1/interfaces" / path.name, path.read_bytes())
    for shell, place in COMPLETIONS.items():
        for path in (made / "completion" / shell).iterdir():
            put(root / place / path.name, path.read_bytes())
    shutil.rmtree(made)


def add_copyright(root: Path, criu: Path) -> None:
    """Add the licence of each part of the package; ``criu`` is what :func:`add_criu` returned."""
    gcc = run(["gcc", "-dumpversion"], "asking for the compiler's version").strip()
    try:
        text = deb_copyright.write(
            [
                *deb_copyright.of_python(root / HOME / "python", str(HOME / "python")),
                *deb_copyright.of_debian(criu, str(HOME / "criu")),
                deb_copyright.of_gcc(
                    gcc,
                    [
                        str(HOME / "criu_plugin/libphos_criu.so"),
                        str(HOME / "runtime_plugin/phos_plugin.so"),
                    ],
                ),
            ]
        )
    except deb_copyright.Unlicensed as error:
        sys.exit(str(error))
    put(root / "usr/share/doc/phosd/copyright", text)


def add_control(
    root: Path, version: str, architecture: str, units: Mapping[str, str], suite: Suite
) -> None:
    """Add what dpkg needs (dependencies, configuration files, maintainer scripts) and what lintian
    does (the changelog, and the reasons for what it would find).
    """
    debian = ROOT / "packaging/debian"
    put(root / "etc/phos/phosd.toml", (ROOT / "packaging/phosd.toml").read_bytes())
    put(root / "DEBIAN/conffiles", "/etc/phos/phosd.toml\n")
    for schema in (ROOT / "docs/reference").glob("*.schema.json"):
        put(root / SCHEMAS / schema.name, schema.read_bytes())
    values = {**units, "IN_PROGRAMS": " ".join(IN_PROGRAMS)}
    for script in SCRIPTS:
        put(root / "DEBIAN" / script, filled((debian / script).read_text(), values), 0o755)
    values = {
        "VERSION": version,
        "RELEASE": suite.codename,
        "MAINTAINER": maintainer(),
    }
    changes = filled((debian / "changelog").read_text(), values)
    put(root / "usr/share/doc/phosd/changelog.gz", gzip.compress(changes.encode(), mtime=0))
    overrides = root / "usr/share/lintian/overrides/phosd"
    put(overrides, (debian / "lintian-overrides").read_bytes())
    size = sum(path.lstat().st_size for path in root.rglob("*"))
    control = CONTROL.format(
        version=version,
        maintainer=maintainer(),
        architecture=architecture,
        depends=", ".join(dependencies(suite)),
        kilobytes=size // 1024,
    )
    put(root / "DEBIAN/control", control)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with ``@NAME@`` replaced by the value of that name."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def maintainer() -> str:
    name, address = MAINTAINER
    variables = os.environ
    return f"{variables.get('DEBFULLNAME', name)} <{variables.get('DEBEMAIL', address)}>"


def dependencies(suite: Suite) -> list[str]:
    """Return the dependencies: the release's Python, for the bundled modules, and the C and C++
    libraries of the build.
    """
    major, minor = suite.python
    gcc = run(["gcc", "-dumpversion"], "asking for the compiler's version").strip()
    return [
        f"python3 (>= {major}.{minor}~)",
        f"python3 (<< {major}.{minor + 1}~)",
        f"libc6 (>= {own_glibc()})",
        f"libstdc++6 (>= {gcc.partition('.')[0]})",
        "libgcc-s1",
        "default-dbus-system-bus | dbus-system-bus",
        "init-system-helpers (>= 1.52)",
        "systemd",
    ]


def put(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def project_version() -> str:
    text = (ROOT / "phosd/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    if found is None:
        sys.exit("phosd/__init__.py has no __version__")
    return found.group(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", type=Path, default=ROOT / "build/native", metavar="BUILD")
    parser.add_argument("--cmake", type=Path, default=Path(sys.executable).with_name("cmake"))
    parser.add_argument("--cache", type=Path, default=ROOT / "build/deb", metavar="DIR")
    parser.add_argument("--output", type=Path, default=ROOT / "build", metavar="DIR")
    parser.add_argument("--suite", choices=sorted(OTHERS), help="(default: this machine's release)")
    parser.add_argument("--version", help="(default: phosd's, and the release)")
    args = parser.parse_args()
    suite = OTHERS.get(args.suite) or own_suite()
    require_fit(suite)
    version = args.version or project_version() + suite.suffix
    os.umask(0o022)
    for folder in (args.cache, args.output):
        folder.mkdir(parents=True, exist_ok=True)
    architecture = run(["dpkg", "--print-architecture"], "asking for the architecture").strip()
    package = args.output.resolve() / f"phosd_{version}_{architecture}.deb"
    with tempfile.TemporaryDirectory(prefix="root-", dir=args.cache) as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        add_native(root, args.native.resolve(), args.cmake)
        add_python(root, args.cache, suite)
        add_copyright(root, add_criu(root, args.cache))
        add_programs(root)
        add_for_others(root)
        units = add_units(root)
        add_documents(root)
        add_control(root, version, architecture, units, suite)
        run(["dpkg-deb", "--root-owner-group", "-Zxz", "-z2", "--build", root, package], "dpkg")
    print(package)


if __name__ == "__main__":
    main()

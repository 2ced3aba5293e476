"""`make setup` installs every program that phosd, its tests and its packaging start by name.

A machine in use hides a package that nobody lists: it is red on a fresh one only. So the programs
are taken from the code, and each must have a package: one of those that README.md asks for or that
each Debian has, or one that ``packaging/system_packages.sh`` installs.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import PROGRAMS

ROOT = Path(__file__).parents[2]
STARTING = {
    "subprocess": {"run", "Popen", "check_output", "check_call"},
    "os": {"execvp", "execvpe", "posix_spawnp"},
    "shutil": {"which"},
    "asyncio": {"create_subprocess_exec"},
    "": {"run"},  # of packaging/
}
"""Functions that take the words of a command, or the name of a program, as their first argument."""

OF_EACH_DEBIAN = {
    "apt": "apt-cache apt-get",
    "bash": "bash",
    "coreutils": "cat chroot cp env mktemp nice rm sleep timeout touch true",
    "dash": "sh",
    "dpkg": "dpkg dpkg-deb",
    "libc-bin": "ldconfig",
    "mount": "mount umount",
    "passwd": "useradd",
    "tar": "tar",
    "util-linux": "dmesg findmnt flock nsenter setpriv unshare",
}
ASKED_FOR = {
    "gcc": "cc gcc nm objdump readelf strip",
    "git": "git",
    "make": "make",
    "python3": "python python3",
}
"""README.md: "root, Python 3.11 or newer, gcc and make", and who has a checkout has git."""
BESIDE = {
    "g++": "c++",
    "gpg": "gpgconf",
    "iptables": "iptables-restore",
    "procps": "kill pgrep",
    "systemd": "journalctl systemctl systemd-analyze systemd-socket-activate systemd-stdio-bridge",
}
"""Programs of packages that are listed for another program."""
STARTED_BY_OTHERS = {"iptables": "CRIU, for a container with a network of its own"}
"""Programs that no code here names, and who starts them."""
OPTIONAL = {
    "containerd": "looked for, to say which release there is",
    "criu": "phosd brings its own where there is none",
    "crun": "looked for, to say which release there is",
    "docker": "looked for, to say which release there is",
    "nvcc": "of benchmarks on a real GPU",
    "phos": "phosd's own, in examples",
    "srun": "of a Slurm job",
}
"""Programs that tests and set-up do without."""


def _first_words(node: ast.expr, lists: dict[str, set[str]]) -> set[str]:
    """The first word of a command, as far as it is written out."""
    match node:
        case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]):
            return _first_words(first, lists)
        case ast.Starred(value=inner) | ast.BinOp(left=inner):
            return _first_words(inner, lists)
        case ast.Constant(value=str(word)):
            return {word}
        case ast.Name(id=name):
            return lists.get(name, set())
    return set()


def _started(source: str) -> Iterator[str]:
    """The programs that a file starts or looks for."""
    tree = ast.parse(source)
    lists: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.List() | ast.Tuple() as words)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.List() | ast.Tuple() as words)
            ):
                lists[name] |= _first_words(words, {})
    for node in ast.walk(tree):
        match node:
            case (
                ast.Call(func=ast.Attribute(ast.Name(id=module), name), args=[command, *_])
                | ast.Call(func=ast.Name(id=name) as module, args=[command, *_])
            ):
                if name in STARTING.get(module if isinstance(module, str) else "", ()):
                    yield from _first_words(command, lists)


def started_programs() -> dict[str, set[str]]:
    """The programs that code starts by name, with the files that do."""
    ours = {path.stem for path in PROGRAMS.iterdir()}
    found: dict[str, set[str]] = defaultdict(set)
    for folder in ("phosd", "tests", "packaging"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not any(f"{module}." in text for module in filter(None, STARTING)):
                continue
            for word in _started(text):
                if re.fullmatch(r"[a-z][a-z0-9_.+-]*", word) and word not in ours:
                    found[word].add(str(path.relative_to(ROOT)))
    return found


def installed_programs() -> dict[str, str]:
    """The programs that ``packaging/system_packages.sh`` looks for, with their packages."""
    text = (ROOT / "packaging/system_packages.sh").read_text()
    return dict(re.findall(r"\btool (\S+) ([a-z0-9][a-z0-9+.-]+)", text))


@pytest.mark.always
def test_each_program_that_is_started_has_a_package_that_is_set_up() -> None:
    installed = installed_programs()
    packages = {*installed.values()}
    assert {*BESIDE} <= packages
    known = {*installed, *OPTIONAL}
    for table in (OF_EACH_DEBIAN, ASKED_FOR, BESIDE):
        known |= {program for programs in table.values() for program in programs.split()}
    lacking = {name: files for name, files in started_programs().items() if name not in known}
    assert not lacking, "add their packages to packaging/system_packages.sh, or say here why not"
    assert {*STARTED_BY_OTHERS} <= packages


def test_the_list_is_made_from_the_code() -> None:
    found = started_programs()
    for program in ("ssh-keygen", "patchelf", "systemd-analyze", "tmux"):
        assert found[program], program
    assert list(_started("words = ['unshare', x]\nsubprocess.run([*words, y])")) == ["unshare"]

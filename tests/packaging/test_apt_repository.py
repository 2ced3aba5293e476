"""The page about an apt repository: its commands make one, and apt takes phosd from it only with
the key that has signed it. The packages are empty, the key is thrown away, nothing is installed.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.rotation import EVERYTHING

pytestmark = pytest.mark.skipif(not EVERYTHING, reason="`make test-all` installs reprepro")

PAGE = (Path(__file__).parents[2] / "docs/operate/apt-repository.md").read_text()
VERSIONS = {"bookworm": "0.1.0~deb12u1", "noble": "0.1.0~ubuntu24.04u1"}
"""Those that the page adds."""
PLACES = {"bookworm": "build", "noble": "build/noble"}
NOT_HERE = ("apt install", "make deb")


def blocks(heading: str) -> list[str]:
    """The code of a section."""
    (section,) = re.findall(rf"(?ms)^## {heading}\n(.*?)(?=^## )", PAGE)
    return re.findall(r"(?ms)^```\n(.*?)^```", section)


def package(folder: Path, version: str) -> None:
    """A package that has the name of phosd, and nothing else."""
    root = folder / version
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        f"Package: phosd\nVersion: {version}\nArchitecture: amd64\nSection: admin\n"
        "Priority: optional\nMaintainer: A <a@example.org>\nDescription: of a test\n"
    )
    target = folder / f"phosd_{version}_amd64.deb"
    subprocess.run(["dpkg-deb", "--build", root, target], check=True, capture_output=True)
    shutil.rmtree(root)


@dataclass(frozen=True)
class Node:
    """What apt has of a node, in a folder: ``source`` is the file that the page has."""

    folder: Path
    source: str

    def apt(self, *words: str) -> "subprocess.CompletedProcess[str]":
        shutil.rmtree(self.folder, ignore_errors=True)
        for part in ("lists/partial", "cache/archives/partial", "etc"):
            (self.folder / part).mkdir(parents=True)
        (self.folder / "phosd.sources").write_text(self.source)
        (self.folder / "status").touch()
        settings = {
            "Dir::State": self.folder,
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc": self.folder / "etc",
            "Dir::Etc::sourcelist": self.folder / "phosd.sources",
            "APT::Sandbox::User": "root",
            "APT::Update::Post-Invoke::": "",
            "APT::Architecture": "amd64",
        }
        options = [f"-o{key}={value}" for key, value in settings.items()]
        done = subprocess.CompletedProcess([""], 0, "", "")
        for line in ("update", *words):
            command = ["apt-get", *options, "-qq", *line.split()]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
            if done.returncode:
                break
        return done


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder, with a repository that the page's commands have made in ``srv/phosd``."""
    folder = Path(tempfile.mkdtemp(prefix="phos-"))  # its name is short: gpg's sockets lie in it
    for codename, where in PLACES.items():
        (folder / where).mkdir(parents=True, exist_ok=True)
        package(folder / where, VERSIONS[codename])
    (folder / "bin").mkdir()
    (folder / "bin/gpg").write_text(
        f"#!/bin/sh\nexec {shutil.which('gpg')} --batch --passphrase '' \"$@\"\n"
    )  # which asks nobody for a passphrase
    (folder / "bin/gpg").chmod(0o755)
    lines = "".join(blocks("The repository")).splitlines()
    left = [line for line in lines if not line.startswith(NOT_HERE)]
    assert len(lines) - len(left) == len(NOT_HERE)
    script = "\n".join(left).replace("/srv/", f"{folder}/srv/")
    variables = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    made = subprocess.run(
        ["sh", "-euc", script], cwd=folder, env=variables, capture_output=True, text=True
    )
    subprocess.run(
        ["gpgconf", "--kill", "all"], env=os.environ | {"GNUPGHOME": f"{folder}/srv/phosd-key"}
    )
    assert made.returncode == 0, made.stderr
    assert f"noble|main|amd64: phosd {VERSIONS['noble']}" in made.stdout
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def node(place: Path) -> Node:
    """A node of the release that the page shows, with the key."""
    (source, *_) = blocks("A node")
    source = source.replace("https://packages.example.org/phosd", f"file:{place}/srv/phosd")
    source = source.replace("/usr/share/keyrings/", f"{place}/srv/phosd/")
    return Node(place / "node", source)


@pytest.mark.parametrize("codename", VERSIONS)
def test_a_node_gets_the_package_of_its_release(node: Node, codename: str) -> None:
    node = replace(node, source=node.source.replace("noble", codename))
    done = node.apt("download phosd")
    assert done.returncode == 0, done.stderr
    (fetched,) = node.folder.glob("*.deb")
    assert fetched.name == f"phosd_{VERSIONS[codename]}_amd64.deb"


def test_a_repository_that_another_key_has_signed_is_refused(node: Node) -> None:
    (debian, *_) = Path("/usr/share/keyrings").glob("debian-archive-keyring.*")
    ours = re.sub(r"Signed-By: .*", f"Signed-By: {debian}", node.source)
    refused = replace(node, source=ours).apt("download phosd")
    assert refused.returncode != 0
    assert "is not signed" in refused.stderr


def test_a_repository_that_was_changed_is_refused(node: Node, place: Path) -> None:
    index = place / "srv/phosd/dists/noble/main/binary-amd64"
    before = {path: path.read_bytes() for path in index.iterdir()}
    for path in before:
        path.write_bytes(b"Package: phosd\n")
    refused = node.apt("download phosd")
    for path, content in before.items():
        path.write_bytes(content)
    assert refused.returncode != 0
    assert node.apt("download phosd").returncode == 0

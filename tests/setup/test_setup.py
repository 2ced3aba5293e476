"""The set-up scripts: what they decide, without fetching anything."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.scripts import load

ROOT = Path(__file__).parents[2]


install_criu = load("install_criu")


def package(folder: Path, version: str, content: bytes) -> list[Path]:
    path = folder / f"criu_{version}_amd64.deb"
    path.write_bytes(content)
    return [path]


def test_a_package_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    pinned = install_criu.PINNED_VERSION
    with pytest.raises(SystemExit, match=r"criu_.*\.deb has the SHA-256 .*, not the pinned"):
        install_criu.check_pin(package(tmp_path, pinned, b"something else"), pinned)


def test_a_newer_version_is_accepted_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_criu.check_pin(package(tmp_path, "4.3-1", b"new"), "4.3-1")
    assert "the archive has CRIU 4.3-1" in capsys.readouterr().err


def debian_package(folder: Path, name: str, files: dict[str, str], control: str = "") -> Path:
    """A package as the archive has them, with these files and version 1-2."""
    root = folder / f"{name}.root"
    for path, text in {
        "DEBIAN/control": f"Package: {name}\nVersion: 1-2\nArchitecture: all\n{control}"
        "Maintainer: A <a@example.org>\nDescription: of a test\n",
        **files,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            (root / path).symlink_to(text.removeprefix("-> "))
        else:
            (root / path).write_text(text)
    made = folder / f"{name}_1-2_all.deb"
    subprocess.run(["dpkg-deb", "-Znone", "--build", root, made], check=True, capture_output=True)
    return made


def test_of_each_file_beside_criu_it_is_known_whose_it_is(tmp_path: Path) -> None:
    libraries = "usr/lib/x86_64-linux-gnu"
    criu = {"usr/sbin/criu": "ELF", "usr/share/doc/criu/copyright": "GPL"}
    library = {
        f"{libraries}/libx.so.1.0": "ELF",
        f"{libraries}/libx.so.1": "-> libx.so.1.0",
        "usr/share/doc/libx1": "-> x-base",
    }
    base = {"usr/share/doc/x-base/copyright": "LGPL", "usr/bin/x": "", "usr/lib/x/libx.so": ""}
    packages = [
        debian_package(tmp_path, "criu", criu),
        debian_package(tmp_path, "libx1", library, "Source: x (1-1)\n"),
        debian_package(tmp_path, "x-base", base),
    ]
    prefix = tmp_path / "prefix"
    install_criu.unpack(packages, tmp_path / "unpacked", prefix)
    assert json.loads((prefix / "packages.json").read_text()) == [
        {"name": "criu", "source": "criu", "version": "1-2", "files": ["criu"]},
        {
            "name": "libx1",
            "source": "x",
            "version": "1-1",
            "files": ["lib/libx.so.1", "lib/libx.so.1.0"],
        },
    ]
    assert (prefix / "lib/libx.so.1").read_text() == "ELF"
    assert (prefix / "copyright/libx1").read_text() == "LGPL", "its folder is another package's"


@pytest.mark.parametrize(
    ("version", "enough"),
    [("4.2.1-1", True), ("4.10-2", True), ("5.0", True), ("4.1.1-1", False), ("", False)],
)
def test_versions_are_compared_as_numbers(version: str, enough: bool) -> None:
    assert (install_criu.version_tuple(version) >= install_criu.MINIMUM) is enough


@pytest.mark.parametrize(
    "line",
    [
        "Types: deb\nSigned-By: {keyring}\n",
        "deb [arch=amd64 signed-by={keyring}] http://example.org/debian stable main\n",
    ],
)
def test_the_keyring_is_the_one_that_the_source_names(tmp_path: Path, line: str) -> None:
    keyring = tmp_path / "keyring.gpg"
    keyring.touch()
    source = tmp_path / "source"
    source.write_text(line.format(keyring=keyring))
    assert install_criu.keyring_of(source) == keyring


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only sources that apt sees; their lists are in ``lists`` beside it."""
    (tmp_path / "lists/partial").mkdir(parents=True)
    config = tmp_path / "apt.conf"
    config.write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\n'
        'Dir::Etc::sourceparts "/dev/null";\n'
        f'Dir::State::lists "{tmp_path}/lists";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(config))
    return tmp_path / "sources.list"


def read_lists(sources: Path, archive: str, suite: str, origin: str) -> None:
    """What `apt-get update` leaves of an archive at example.org."""
    release = sources.parent / f"lists/example.org_{archive}_dists_{suite}"
    codename = install_criu.os_release()["VERSION_CODENAME"]
    release.with_name(f"{release.name}_Release").write_text(
        f"Origin: {origin}\nCodename: {codename}\nComponents: main\nArchitectures: amd64 all\n"
        "Date: Sat, 10 Jun 2023 08:00:00 UTC\n"
    )
    release.with_name(f"{release.name}_main_binary-amd64_Packages").touch()


@pytest.mark.parametrize("suite", ["stable", None])
def test_the_archive_is_debians_though_others_use_its_names(
    sources: Path, suite: str | None
) -> None:
    suite = suite or install_criu.os_release()["VERSION_CODENAME"]
    lines = [f"deb http://example.org/{name} {suite} main\n" for name in ("other", "debian")]
    sources.write_text("".join(lines))
    read_lists(sources, "other", suite, "Other")
    read_lists(sources, "debian", suite, "Debian")
    assert install_criu.debian_archive().uri == "http://example.org/debian/"


def test_the_archive_is_found_before_the_first_update(sources: Path) -> None:
    codename = install_criu.os_release()["VERSION_CODENAME"]
    sources.write_text(
        f"deb http://example.org/security {codename}-security main\n"
        f"deb http://example.org/debian {codename} main\n"
    )
    assert install_criu.debian_archive().uri == "http://example.org/debian/"


def test_without_a_source_for_debian_it_says_what_to_do(sources: Path) -> None:
    sources.write_text("deb http://example.org/other elsewhere main\n")
    with pytest.raises(SystemExit, match="name it with PHOS_CRIU="):
        install_criu.debian_archive()


@pytest.mark.parametrize(("mode", "prefix"), [(0o755, ".criu"), (0o700, "/usr/lib/phos/criu")])
def test_criu_goes_where_every_user_can_execute_it(mode: int, prefix: str) -> None:
    with tempfile.TemporaryDirectory(prefix="phos-test-") as folder:
        checkout = Path(folder)
        checkout.chmod(mode)
        (checkout / "packaging").mkdir(mode=0o755)
        shutil.copy(ROOT / "packaging/ensure_criu.sh", checkout / "packaging")
        python = checkout / "python"  # no CRIU works until one is installed
        python.write_text('#!/bin/sh\necho "$*" >>calls\ngrep -q "^packaging/install" calls\n')
        python.chmod(0o755)
        subprocess.run(["packaging/ensure_criu.sh", python], cwd=checkout, check=True)
        calls = (checkout / "calls").read_text().splitlines()
    assert f"packaging/install_criu.py {prefix}" in calls
    assert calls[-1] == "-m phosd.engine.criu"


def test_every_dependency_is_listed_for_pip() -> None:
    listed = subprocess.run(
        [sys.executable, ROOT / "packaging/requirements.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in ("msgspec", "dbus-next", "scikit-build-core", "scikit-learn", "pytest", "cmake"):
        assert any(line.startswith(name) for line in listed), name


def test_a_step_is_one_line_and_a_failure_shows_everything(tmp_path: Path) -> None:
    step = [str(ROOT / "packaging/step.sh"), "the step", str(tmp_path / "log")]
    fine = subprocess.run([*step, "echo", "noise"], capture_output=True, text=True, check=True)
    assert fine.stdout.startswith("the step: done in")
    assert fine.stdout.count("\n") == 1
    failed = subprocess.run(
        [*step, "sh", "-c", "echo why; exit 7"], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 7
    assert failed.stdout == "why\n"
    assert "the step: FAILED" in failed.stderr


def test_nothing_is_installed_where_everything_is_there() -> None:
    done = subprocess.run(
        [ROOT / "packaging/system_packages.sh"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "system packages: all there\n"

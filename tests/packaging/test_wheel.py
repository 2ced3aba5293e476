"""The wheel as it is built, in a virtual environment that has nothing else: its programs start, and
they save a program and bring it back.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from phosd.engine.criu.run.program import candidates
from tests.packaging.built import WHEELHOUSE, only_when_built, the_only
from tests.support.bus import private_bus
from tests.support.harness import PROGRAMS, alive, compile_kernels, parse, wait_until

pytestmark = only_when_built

EXAMPLE = Path(__file__).parents[2] / "examples/client.py"
GPU = {name: value for name, value in os.environ.items() if name.startswith("PHOS_SOFTGPU")}


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel; ``folder`` is for what a test writes."""

    venv: Path
    folder: Path
    bus: str

    def program(self, name: str) -> str:
        return str(self.venv / "bin" / name)

    @property
    def environment(self) -> dict[str, str]:
        """What its programs see: nothing of the checkout but CRIU, which no wheel has."""
        return {
            **GPU,
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.folder),
            "DBUS_SESSION_BUS_ADDRESS": self.bus,
            "PHOS_BUS": "session",
            "PHOS_GPU": "soft",
            "PHOS_RUNTIME_DIR": str(self.folder / "run"),
            "PHOS_TEST_CACHE": str(self.folder / "kernels"),
            "PHOS_CRIU": str(candidates()[0]),
        }

    def begun(self) -> tuple[int, Path]:
        """Start a program under the wheel's hook; its pid and its output."""
        program = (self.program("python"), str(PROGRAMS / "single.py"), "0")
        started = self.phos("run", "--gpu", "soft", "--detach", "--", *program)
        return int(str(started["pid"])), Path(str(started["stdout"]))

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program(program), *words],
            capture_output=True,
            text=True,
            timeout=120,
            env=self.environment,
            cwd=self.folder,
        )

    def phos(self, *words: str) -> dict[str, object]:
        """The last line of ``phos --json``, which must succeed."""
        done = self.run("phos", "--json", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        last: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return last


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    venv, folder = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    wheel = the_only("phosd-*.whl", "wheel")
    install = ["-m", "pip", "install", "--quiet", "--no-compile", "--no-index"]
    packages = [f"--find-links={WHEELHOUSE}", str(wheel)]
    subprocess.run([str(venv / "bin/python"), *install, *packages], check=True)
    (folder / "kernels").mkdir()
    compile_kernels(folder / "kernels")
    with tempfile.TemporaryDirectory(prefix="phos-bus-") as place, private_bus(Path(place)) as bus:
        yield Installed(venv, folder, bus)


@contextmanager
def serving(installed: Installed) -> Iterator[None]:
    """The wheel's phosd, until the end of the block."""
    log, configuration = installed.folder / "phosd.log", installed.folder / "phosd.toml"
    configuration.touch()
    options = [f"--state-dir={installed.folder / 'state'}", f"--config={configuration}"]
    options.append(f"--runtime-dir={installed.folder / 'run'}")
    command = [installed.program("phosd"), "--session", *options]
    with log.open("wb") as file:
        daemon = subprocess.Popen(
            command, env=installed.environment, cwd=installed.folder, stderr=file
        )
    try:
        wait_until(
            lambda: daemon.poll() is not None or b"serves org.phos" in log.read_bytes(), "phosd"
        )
        yield
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(120) == 0, log.read_text()


@pytest.mark.parametrize("name", ["phos", "phos-tui", "phosd"])
def test_its_programs_start(installed: Installed, name: str) -> None:
    done = installed.run(name, "--version")
    assert done.returncode == 0, done.stderr
    assert "0." in done.stdout


def test_it_has_the_header_for_c_programs(installed: Installed) -> None:
    text = "import pathlib, phosd, sys\n"
    text += "headers = (pathlib.Path(phosd.__file__).parent).rglob('*.h')\n"
    text += "print(*[str(each.relative_to(each.parents[1])) for each in headers])\n"
    done = installed.run("python", "-c", text)
    assert done.stdout.split() == ["include/phos.h"], done.stderr


def test_it_lacks_what_only_tests_run(installed: Installed) -> None:
    text = "from importlib.util import find_spec\n"
    text += "print(*[bool(find_spec(f'phosd.engine.analysis.{n}')) for n in ('code', 'reference')])"
    done = installed.run("python", "-c", text)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_without_a_service_phos_says_what_to_start(installed: Installed) -> None:
    done = installed.run("phos", "ps")
    assert done.returncode != 0
    assert "phosd" in done.stderr


def test_it_says_where_to_get_a_criu(installed: Installed) -> None:
    environment = {**installed.environment, "PHOS_CRIU": "/nowhere/criu"}
    done = subprocess.run(
        [installed.program("phos"), "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=installed.folder,
    )
    assert str(installed.venv) in done.stdout, "it uses the wheel's own hook"
    assert "install CRIU 4.2 or newer and name it with PHOS_CRIU" in done.stdout


def test_a_program_is_saved_killed_and_restored(installed: Installed) -> None:
    with serving(installed):
        pid, output = installed.begun()
        try:
            wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert f"{installed.venv}/lib" in maps and "libphos_hook.so" in maps
            saved = installed.phos("checkpoint", str(pid))
            assert (saved["state"], saved["mode"]) == ("done", "concurrent")
            position = output.stat().st_size
            wait_until(lambda: len(parse(output.read_bytes()[position:])) > 10, "later steps")
        finally:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), "its end")
        before, position = parse(output.read_bytes()), output.stat().st_size
        assert installed.phos("restore", str(saved["result"]))["result"] == str(pid)
        try:
            wait_until(
                lambda: len(parse(output.read_bytes()[position:]).keys() & before.keys()) > 5,
                "steps that were seen before",
            )
        finally:
            os.kill(pid, signal.SIGKILL)
        again = parse(output.read_bytes()[position:])
        common = again.keys() & before.keys()
        assert {step: again[step] for step in common} == {step: before[step] for step in common}


def test_the_example_of_the_client_works_with_it(installed: Installed) -> None:
    with serving(installed):
        pid, output = installed.begun()
        try:
            wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
            done = installed.run("python", str(EXAMPLE), str(pid))
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"process {pid} goes on from there" in done.stdout
            position = output.stat().st_size
            wait_until(lambda: len(parse(output.read_bytes()[position:])) > 3, "later steps")
        finally:
            os.kill(pid, signal.SIGKILL)


def test_type_checkers_may_use_its_types(installed: Installed) -> None:
    done = installed.run("python", "-c", "import phosd; print(phosd.__path__[0])")
    assert (Path(done.stdout.strip()) / "py.typed").exists()

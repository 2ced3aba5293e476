"""``phos run``: the relay, the exit codes, and a program with nothing that ties it to us."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phosd.cli.run_command.environment import do_without_nvidias_opencl
from tests.support.harness import alive, running, users_hooks, wait_until

PHOS = [sys.executable, "-m", "phosd.cli.main"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder and a runtime folder of the test's own."""
    users_hooks(tmp_path / "run")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PHOS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PHOS_GPU", "soft")
    return tmp_path


def phos_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PHOS, "run", "--", *words], capture_output=True, text=True, timeout=60)


def files(home: Path) -> dict[str, Path]:
    (folder,) = (home / "state" / "phos" / "run").iterdir()
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("kill -SEGV $$", 139)],
)
def test_the_exit_code_is_the_programs(script: str, status: int) -> None:
    assert phos_run("sh", "-c", script).returncode == status


@pytest.mark.usefixtures("home")
def test_programs_that_cannot_be_started(tmp_path: Path) -> None:
    missing = phos_run("/no/such/program")
    assert (missing.returncode, "No such file" in missing.stderr) == (127, True)
    (tmp_path / "plain").write_text("no program")
    denied = phos_run(str(tmp_path / "plain"))
    assert (denied.returncode, "Permission denied" in denied.stderr) == (126, True)
    (tmp_path / "plain").chmod(0o755)
    nonsense = phos_run(str(tmp_path / "plain"))
    assert (nonsense.returncode, "Exec format error" in nonsense.stderr) == (126, True)
    assert "name its interpreter" in nonsense.stderr


def test_an_unknown_option_is_none_of_the_command(home: Path) -> None:
    for words, said in (
        (["--nam", "bert", "true"], "--name"),
        (["--on-trm=save", "true"], "--on-term"),
    ):
        done = subprocess.run([*PHOS, "run", *words], capture_output=True, text=True, timeout=60)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        assert "No such option" in done.stderr and words[0].partition("=")[0] in done.stderr
    assert not (home / "state").exists()
    theirs = [*PHOS, "run", "printf", "%s", "--nam", "-x", "--", "--name"]
    done = subprocess.run(theirs, capture_output=True, text=True, timeout=60)
    assert done.stdout == "--nam-x----name"


@pytest.mark.usefixtures("home")
def test_files_that_cannot_be_kept() -> None:
    words = [*PHOS, "run", "--keep-files", "runs", "--keep-files", "x" * 5000, "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no more than 4095; name a folder above it" in done.stderr
    unset = [*PHOS, "run", "--keep-files", "", "--", "true"]
    done = subprocess.run(unset, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "has an empty name; is a variable not set?" in done.stderr


@pytest.mark.usefixtures("home")
def test_output_without_a_place_is_not_the_commands_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nope")
    done = phos_run("true")
    assert done.returncode == 6
    assert "its output files cannot be made" in done.stderr and "/proc/nope" in done.stderr
    assert "set XDG_STATE_HOME" in done.stderr
    words = [*PHOS, "run", "--name", "bert", "--", "true"]
    named = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert named.returncode == 6, named.stderr
    assert "/proc/nope/phos/names cannot be used" in named.stderr
    assert "set XDG_STATE_HOME" in named.stderr


@pytest.mark.usefixtures("home")
def test_why_it_gets_the_software_gpu() -> None:
    """The variable of these tests asks for it."""
    done = phos_run("true")
    assert "phos: as you asked; the program gets the software GPU" in done.stderr
    assert "no GPU" not in done.stderr


def test_output_is_relayed_and_kept(home: Path) -> None:
    done = phos_run("sh", "-c", "echo out; echo err >&2; printf tail")
    assert done.stdout == "out\ntail"
    assert done.stderr.splitlines()[-1] == "err"
    assert "software GPU" in done.stderr
    kept = files(home)
    assert f"; its output is kept in {kept['stdout'].parent}\n" in done.stderr
    assert kept["stdout"].read_text() == "out\ntail"
    assert kept["stderr"].read_text() == "err\n"
    assert kept["stdout"].stat().st_mode & 0o777 == 0o600


def test_output_comes_while_the_program_runs(home: Path) -> None:
    fifo = home / "fifo"
    os.mkfifo(fifo)
    with running(
        [*PHOS, "run", "--", "sh", "-c", f"echo first; read line < {fifo}; echo second"],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        assert process.poll() is None
        fifo.write_text("go\n")
        assert process.stdout.read() == "second\n"
    assert process.returncode == 0


@pytest.mark.usefixtures("home")
def test_large_output_arrives_whole() -> None:
    done = phos_run(sys.executable, "-c", "print('x' * 5_000_000)")
    assert len(done.stdout) == 5_000_001


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    script = (
        f"trap 'echo caught; exit 5' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    )
    with running([*PHOS, "run", "--", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "caught\n"
    assert process.returncode == 5


def inspect(pid: int) -> dict[str, object]:
    """What ties a process to its surroundings."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "leader": fields[2] == fields[3] == str(pid),
        "terminal": int(fields[4]),
        "descriptors": {
            int(link.name): str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()
        },
        "flags": {
            number: int(
                Path(f"/proc/{pid}/fdinfo/{number}").read_text().split("flags:")[1].split()[0], 8
            )
            for number in (1, 2)
        },
    }


def test_nothing_ties_the_program_to_its_terminal(home: Path) -> None:
    controller, terminal = pty.openpty()
    extra = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(extra, True)
    try:
        done = subprocess.run(
            [*PHOS, "run", "--detach", "--json", "--", "sleep", "60"],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
            timeout=60,
            pass_fds=[extra],
            check=True,
        )
    finally:
        for descriptor in (controller, terminal, extra):
            os.close(descriptor)
    pid = int(json.loads(done.stdout)["pid"])
    try:
        wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the program")
        found = inspect(pid)
        kept = files(home)
        assert found["leader"]
        assert found["terminal"] == 0
        assert found["descriptors"] == {
            0: "/dev/null",
            1: str(kept["stdout"]),
            2: str(kept["stderr"]),
        }
        for flags in found["flags"].values():  # type: ignore[attr-defined]
            assert flags & (os.O_APPEND | os.O_ACCMODE) == os.O_APPEND | os.O_WRONLY
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("home")
def test_the_program_outlives_its_relay() -> None:
    with running(
        [*PHOS, "run", "--", "sh", "-c", "echo $$; exec sleep 60"],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    try:
        time.sleep(0.2)
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("home")
def test_a_reader_that_goes_away_does_not_hurt_the_program(tmp_path: Path) -> None:
    script = f"for i in $(seq 30); do echo $i; sleep 0.02; done; touch {tmp_path}/done; exit 3"
    with running([*PHOS, "run", "--", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.stdout.close()
    assert process.returncode == 3
    assert (tmp_path / "done").exists()


@pytest.mark.usefixtures("home")
def test_the_environment_changes_by_the_hook_and_the_software_gpu_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    savable = {"UV_USE_IO_URING", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_HOST_ENABLE"}
    for name in savable:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OCL_ICD_VENDORS", "")  # it was asked for
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    done = phos_run(sys.executable, "-c", code)
    before, after = json.loads(bare.stdout), json.loads(done.stdout)
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    assert changed == {"LD_PRELOAD", "LD_LIBRARY_PATH", *savable}
    assert {after[name] for name in savable} == {"0"}
    assert after["LD_PRELOAD"].split(":")[0].endswith("libphos_hook.so")
    assert (Path(after["LD_LIBRARY_PATH"].split(":")[0]) / "libcuda.so.1").exists()


@pytest.mark.parametrize(
    ("vendors", "given", "others"),
    [
        ({}, {}, None),
        ({"intel": "libintelocl.so"}, {}, None),
        ({"nvidia": "libnvidia-opencl.so.1"}, {"OCL_ICD_VENDORS": "/etc/OpenCL/vendors"}, None),
        ({"nvidia": "libnvidia-opencl.so.1"}, {"OPENCL_VENDOR_PATH": "/opt"}, None),
        ({"nvidia": "libnvidia-opencl.so.1\n"}, {}, ""),
        ({"nvidia": "libnvidia-opencl.so.1", "pocl": "libpocl.so.2\n"}, {}, "libpocl.so.2"),
        (
            {"a": "/opt/liba.so", "b": "libb.so", "nvidia": "/usr/lib/libnvidia-opencl.so.1"},
            {"OCL_ICD_FILENAMES": "/opt/mine.so"},
            "/opt/liba.so:libb.so:/opt/mine.so",
        ),
        (
            {"pocl": "libpocl.so.2"},
            {"OCL_ICD_FILENAMES": "libpocl.so.2:libnvidia-opencl.so.1"},
            "libpocl.so.2",
        ),
        ({}, {"OCL_ICD_FILENAMES": "libnvidia-opencl.so.1"}, ""),
        ({"pocl": "libpocl.so.2"}, {"OCL_ICD_FILENAMES": "libpocl.so.2"}, None),
    ],
)
def test_nvidias_opencl_is_kept_from_a_program_that_was_not_told_where_to_look(
    tmp_path: Path, vendors: dict[str, str], given: dict[str, str], others: str | None
) -> None:
    for name, library in vendors.items():
        (tmp_path / f"{name}.icd").write_text(library)
    found = dict(given)
    said = do_without_nvidias_opencl(found, tmp_path)
    if others is None:
        assert (said, found) == ([], given)
        return
    assert found.pop("OCL_ICD_FILENAMES", "") == others
    place = Path(found.pop("OCL_ICD_VENDORS"))
    assert place.is_dir() and not [*place.glob("*.icd")]
    named = bool(others) or "OCL_ICD_FILENAMES" in given
    assert len(said) == 1 + named and said[0] == f"OCL_ICD_VENDORS={place}"


@pytest.mark.usefixtures("home")
def test_it_says_why_phosd_will_not_find_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "find" not in phos_run("true").stderr
    monkeypatch.setenv("PHOS_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    assert "phosd finds the program once it is started" in phos_run("true").stderr
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("home")
def test_managed_memory_is_put_into_the_host_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHOS_MANAGED", raising=False)
    words = ("--", "sh", "-c", "echo ${PHOS_MANAGED:-unset}")
    told = subprocess.run(
        [*PHOS, "run", "--managed", "host", *words], capture_output=True, text=True, timeout=60
    )
    assert told.stdout == "host\n"
    assert "managed memory is in the host" in told.stderr
    assert phos_run(*words[1:]).stdout == "unset\n"


@pytest.mark.usefixtures("home")
def test_what_was_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    monkeypatch.setenv("UV_USE_IO_URING", "1")
    done = phos_run("sh", "-c", "echo $UV_USE_IO_URING $LD_LIBRARY_PATH")
    assert done.stdout.startswith("1 ")
    assert done.stdout.strip().endswith(":/opt/lib")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("gpus", "environment", "said"),
    [
        (1, {}, []),
        (2, {}, ["NCCL_NVLS_ENABLE=0", "NCCL_CUMEM_HOST_ENABLE=0"]),
        (2, {"NCCL_NVLS_ENABLE": "1"}, ["NCCL_CUMEM_HOST_ENABLE=0"]),
        (2, {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "1"}, []),
    ],
)
def test_where_there_are_several_gpus_it_says_what_nccl_does_without(
    tmp_path: Path, gpus: int, environment: dict[str, str], said: list[str]
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (tmp_path / name).touch()
    code = (
        "import pathlib, sys; from phosd.cli.main import main;"
        "from phosd.engine.system import cuda;"
        "cuda._DEVICES = pathlib.Path(sys.argv.pop(1)); main()"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    words = [sys.executable, "-c", code, str(tmp_path), "run", "--", "true"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=bare | environment, timeout=60, check=True
    )
    assert re.findall(r"NCCL_\w+=\d", done.stderr) == said


@pytest.mark.usefixtures("home")
def test_without_a_driver_a_real_gpu_is_refused() -> None:
    if Path("/dev/nvidiactl").exists():
        assert phos_run("true").returncode == 0
        return
    done = subprocess.run(
        [*PHOS, "run", "--gpu", "real", "--", "true"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 6
    assert "there is no CUDA driver" in done.stderr


@pytest.mark.usefixtures("home")
def test_options_of_the_program_are_its_own() -> None:
    assert phos_run("echo", "--json", "-d", "--help").stdout == "--json -d --help\n"
    no_dashes = subprocess.run(
        [*PHOS, "run", "echo", "--detach"], capture_output=True, text=True, timeout=60
    )
    assert no_dashes.stdout == "--detach\n"
    assert subprocess.run([*PHOS, "run"], capture_output=True, timeout=60).returncode == 2

"""A second, unprivileged user tries everything against a daemon that has the first one's program,
image, history and schedule, while a checkpoint is on its way; and gets nowhere.
"""

import os
import pwd
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from phosd.bus import NAME
from phosd.engine.hook_client.wire import HEADER, MAGIC, PROGRAM_WISH, REPLY, VERSION, Status, Type
from tests.support.bus import busctl
from tests.support.harness import Target, start, wait_until
from tests.support.service import MANAGER, ROOT
from tests.system.service.test_end_to_end import copy_by_chunks, phos, phosd

STRANGER = pwd.getpwnam("nobody").pw_uid
SECRET = "hunter2-in-the-environment"
ARGUMENT = "hunter2-in-the-arguments"
PROPERTIES = "org.freedesktop.DBus.Properties"
_AS_STRANGER = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]


@dataclass
class Stage:
    """What there is to attack: ``job`` drains slowly, ``image`` is complete."""

    bus: str
    folder: Path
    target: Target
    image: str
    job: str

    def call(self, *arguments: object, path: str = ROOT, interface: str = MANAGER) -> str:
        """A call that the stranger makes."""
        command = ("call", NAME, path, interface, *map(str, arguments))
        return busctl(self.bus, *command, uid=STRANGER).strip()

    def refused(self, *arguments: object, path: str = ROOT, interface: str = MANAGER) -> None:
        with pytest.raises(RuntimeError, match="belongs to uid 0"):
            self.call(*arguments, path=path, interface=interface)

    def job_goes_on(self) -> None:
        """It runs, or has ended well meanwhile."""
        names = ("State", "Error", "Message")
        told = busctl(self.bus, "get-property", NAME, self.job, "org.phos.Job1", *names)
        assert told.split('"')[1] in ("running", "done"), told


@pytest.fixture(scope="module")
def stage(bus: str) -> Iterator[Stage]:
    # pytest's own folders are closed to the stranger; this one is open, so that what protects the
    # things in it is their own doing.
    with tempfile.TemporaryDirectory(prefix="phos-open-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        target = start(
            "single",
            folder,
            runtime=folder / "run",
            arguments=("0", ARGUMENT),
            extra={"TOKEN": SECRET},
        )
        try:
            target.wait_for_steps(2)
            copy_by_chunks(folder)
            pid = str(target.pid)
            with phosd(bus, folder):
                image = str(phos(bus, folder, "checkpoint", pid, "--mode", "stop")[-1]["result"])
                (found,) = (p for p in phos(bus, folder, "ps") if p["pid"] == target.pid)
            # At this rate the drain of the next one lasts about as long as these tests: each
            # byte is copied twice.
            rate = max(1, int(str(found["device_bytes"])) // 10)
            brake = folder / "brake"
            brake.touch()
            slow = {
                "PHOS_SOFTGPU_COPY_RATE": str(rate),
                "PHOS_SOFTGPU_COPY_RATE_WHILE": str(brake),
            }
            with phosd(bus, folder, **slow):
                phos(bus, folder, "ps")
                command = ("call", NAME, ROOT, MANAGER, "Checkpoint", "ua{sv}", pid, "1")
                job = busctl(bus, *command, "mode", "s", "concurrent").split('"')[1]
                here = Stage(bus, folder, target, image, job)
                wait_until(
                    lambda: (
                        "drain" in busctl(bus, "get-property", NAME, job, "org.phos.Job1", "Phase")
                    ),
                    "the drain",
                )
                yield here
                brake.unlink()
                target.more_steps(2)
        finally:
            target.kill()


@pytest.mark.parametrize("member", ["ListProcesses", "ListImages", "ListJobs"])
def test_lists_are_empty(stage: Stage, member: str) -> None:
    assert stage.call(member).split()[1] == "0"


def test_nothing_is_read_over_the_bus(stage: Stage) -> None:
    managed = stage.call("GetManagedObjects", interface="org.freedesktop.DBus.ObjectManager")
    assert "org.phos.Gpu1" in managed
    for word in ("Process1", "Image1", "Job1", ARGUMENT, SECRET, stage.image):
        assert word not in managed
    # Only this process is looked at: the machine's others come and go.
    for kind in (f"process/_{stage.target.pid}_", "image/", "job/"):
        for line in busctl(stage.bus, "tree", "--list", NAME).split():
            if line.startswith(f"{ROOT}/{kind}"):
                stage.refused("GetAll", "s", "", path=line, interface=PROPERTIES)
    stage.refused("GetProcess", "u", stage.target.pid)
    assert stage.call("ListHistory", "a{sv}", 0) == "aa{sv} 0"


@pytest.mark.parametrize(
    "call",
    [
        ("Checkpoint", "ua{sv}", "PID", 0),
        ("Checkpoint", "ua{sv}", "PID", 1, "every", "d", 60),
        ("Checkpoint", "ua{sv}", "PID", 1, "every", "d", 0),
        ("Checkpoint", "ua{sv}", "PID", 1, "then", "s", "end"),
        ("Continue", "ua{sv}", "PID", 0),
        ("TryCheckpoint", "ua{sv}", "PID", 0),
        ("TryRestore", "sa{sv}", "IMAGE", 0),
        ("Suspend", "ua{sv}", "PID", 0),
        ("Resume", "ua{sv}", "PID", 0),
        ("Migrate", "usa{sv}", "PID", "elsewhere", 0),
        ("Swap", "uua{sv}", "PID", 1, 0),
        ("Swap", "uua{sv}", os.getpid(), "PID", 0),
        ("Restore", "sa{sv}", "IMAGE", 0),
        ("Restore", "sa{sv}", "IMAGE", 1, "output", "s", "/tmp/phos-mine"),
        ("VerifyImage", "sa{sv}", "IMAGE", 0),
        ("DeleteImage", "sa{sv}", "IMAGE", 0),
    ],
    ids=lambda call: f"{call[0]} {call[4] if len(call) > 4 else ''}",
)
def test_nothing_is_begun_or_ended(stage: Stage, call: tuple[object, ...]) -> None:
    known = {"PID": stage.target.pid, "IMAGE": stage.image}
    stage.refused(*(known.get(str(part), part) for part in call))
    stage.job_goes_on()
    assert stage.target.pid in [p["pid"] for p in phos(stage.bus, stage.folder, "ps")]
    assert stage.image in [i["id"] for i in phos(stage.bus, stage.folder, "images")]


def test_a_job_of_another_is_not_cancelled(stage: Stage) -> None:
    stage.refused("Cancel", "a{sv}", 0, path=stage.job, interface="org.phos.Job1")
    stage.job_goes_on()


def test_a_parent_is_ones_own(stage: Stage) -> None:
    with subprocess.Popen([*_AS_STRANGER, "sleep", "100"]) as mine:
        wait_until(lambda: os.stat(f"/proc/{mine.pid}").st_uid == STRANGER, "my own process")  # noqa: PTH116
        stage.refused("Checkpoint", "ua{sv}", mine.pid, 1, "parent", "s", stage.image)
        mine.kill()


def find(*words: str) -> list[str]:
    """What the stranger's own ``find`` finds; what it may not enter it says, and goes on."""
    done = subprocess.run([*_AS_STRANGER, "find", *words], capture_output=True, text=True)
    return done.stdout.split()


def files_below(folder: Path) -> list[Path]:
    """What is no folder in it, also while a job that ends removes some; pathlib would fail."""
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names]


def test_no_file_is_read_or_written(stage: Stage) -> None:
    """Images, packs, history, journal, logs of movers, CRIU's files on their way to disk."""
    run, state = stage.folder / "run", stage.folder / "state"
    staging = [str(path) for path in Path("/dev/shm").glob("phosd-*")]
    for folder in (str(run), str(state), *staging):
        readable = find(folder, "(", "-type", "f", "-o", "-type", "s", ")", "-readable")
        writable = find(folder, "-not", "-type", "l", "-writable")
        # Where programs ask for checkpoints of themselves, as the stranger's may, too.
        own = [str(run / "program.sock")] if folder == str(run) else []
        assert (readable, writable) == (own, own)
    # As root sees it, there was something to find: the hook's socket, too, but for the moment in
    # which CRIU saves the program.
    there = {"manifest.json", "history.db", f"{stage.target.pid}.sock"}

    def made() -> set[str]:
        return {path.name for path in (*files_below(state), *files_below(run))}

    wait_until(lambda: there <= made(), f"{there} to be there")
    assert any(name.endswith(".pack") for name in made())
    journal = files_below(run / "journal")
    # A job that runs now did so when the journal was looked at.
    if '"running"' in busctl(stage.bus, "get-property", NAME, stage.job, "org.phos.Job1", "State"):
        assert journal


def test_no_socket_lets_the_stranger_in(stage: Stage) -> None:
    """The hook's, the movers', and whatever else phosd listens on."""
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    run = stage.folder / "run"
    wait_until((run / "hook/0" / f"{stage.target.pid}.sock").is_socket, "the hook's socket")
    found = [path for path in files_below(run) if path.is_socket()]
    found.remove(run / "program.sock")
    for path in found:
        done = subprocess.run(
            [*_AS_STRANGER, "/usr/bin/python3", "-S", "-c", code, str(path)],
            capture_output=True,
            text=True,
        )
        assert "PermissionError" in done.stderr, path


def test_who_asks_for_a_checkpoint_of_itself_gets_at_nothing_else(stage: Stage) -> None:
    """The stranger's process is no GPU process: it is told so, and nothing comes of it."""
    header = HEADER.pack(MAGIC, VERSION, Type.PROGRAM, 1, 0, PROGRAM_WISH.size, 0)
    request = header + PROGRAM_WISH.pack(stage.target.pid, 1, 0)
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "s.sendall(bytes.fromhex(sys.argv[2])); print(os.getpid(), s.recv(1000).hex())"
    )
    place = str(stage.folder / "run" / "program.sock")
    before = phos(stage.bus, stage.folder, "jobs")
    asking = subprocess.run(
        [*_AS_STRANGER, "/usr/bin/python3", "-S", "-c", code, place, request.hex()],
        capture_output=True,
        text=True,
        check=True,
    )
    pid, reply = asking.stdout.split()
    _, _, kind, sequence, status, length, _ = HEADER.unpack_from(bytes.fromhex(reply))
    assert (kind, sequence, status) == (Type.PROGRAM | REPLY, 1, Status.BUSY)
    text = bytes.fromhex(reply)[HEADER.size :].decode()
    assert len(text) == length and f"process {pid} uses no GPU" in text
    jobs = {str(job["job"]) for job in phos(stage.bus, stage.folder, "jobs")}
    assert jobs == {str(job["job"]) for job in before}
    stage.job_goes_on()


def test_a_name_in_the_hooks_folder_is_not_taken_for_another_process(stage: Stage) -> None:
    """Squatting the name of a process that has no hook, by a socket or by a symbolic link, where an
    earlier phosd has left a folder in which everybody may.
    """
    folder = stage.folder / "run" / "hook"
    done = subprocess.run([*_AS_STRANGER, "touch", str(folder / "mine")], capture_output=True)
    assert b"Permission denied" in done.stderr
    folder.chmod(0o1777)
    squat = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
        "s.listen(); print(flush=True); time.sleep(100)"
    )
    with (
        subprocess.Popen(["sleep", "100"]) as victim,
        subprocess.Popen(
            [
                *_AS_STRANGER,
                "/usr/bin/python3",
                "-S",
                "-c",
                squat,
                str(folder / f"{victim.pid}.sock"),
            ],
            stdout=subprocess.PIPE,
        ) as squatter,
    ):
        link = folder / f"{os.getpid()}.sock"
        try:
            assert squatter.stdout is not None
            squatter.stdout.readline()
            real = folder / "0" / f"{stage.target.pid}.sock"
            subprocess.run([*_AS_STRANGER, "ln", "-s", str(real), str(link)], check=True)
            states = {p["pid"]: p["hook"] for p in phos(stage.bus, stage.folder, "ps")}
            assert states.get(victim.pid) != "hooked"
            assert states.get(os.getpid()) != "hooked"
            assert states[stage.target.pid] == "hooked"
            # The name of a hooked process cannot be taken away from it.
            done = subprocess.run([*_AS_STRANGER, "rm", "-f", str(real)], capture_output=True)
            assert done.returncode
            assert real.is_socket()
        finally:
            squatter.kill()
            victim.kill()
            link.unlink(missing_ok=True)
            folder.chmod(0o755)


def test_the_environment_is_written_nowhere(stage: Stage) -> None:
    """Its values are in the memory that CRIU saved, and nowhere else; not even root's logs."""
    assert SECRET in Path(f"/proc/{stage.target.pid}/environ").read_text()
    for path in sorted(files_below(stage.folder)):
        if not path.is_file() or path.is_symlink():
            continue
        try:
            data, mode = path.read_bytes(), path.stat().st_mode
        except FileNotFoundError:  # the job has ended meanwhile
            continue
        memory = path.suffix == ".pack" or any(part.startswith("criu") for part in path.parts)
        assert memory or SECRET.encode() not in data, path
        if ARGUMENT.encode() in data or memory:
            assert mode & 0o077 == 0, path
    log = (stage.folder / "phosd.log").read_text()
    assert ARGUMENT not in log

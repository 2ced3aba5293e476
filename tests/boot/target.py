"""A program of ``tests/programs`` in a booted machine, run by one of its users under the hook."""

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

import cuda.bindings

from tests.boot.machine import Machine
from tests.support.harness import PROGRAMS, compile_kernels, parse, wait_until

PLACE, KERNELS, _PACKAGES = "/opt/target/programs", "/opt/target/kernels", "/opt/target/python"
VARIABLES = {"PYTHONPATH": _PACKAGES, "PHOS_TEST_CACHE": KERNELS}
"""What a target needs in its environment."""


def prepare(machine: Machine) -> None:
    """Bring the programs, their compiled kernels and the packages that they import."""
    machine.carry(PROGRAMS, PLACE)
    packages = Path(cuda.bindings.__path__[0]).parent
    for name in ("bindings", "pathfinder"):
        machine.carry(packages / name, f"{_PACKAGES}/cuda/{name}")
    with tempfile.TemporaryDirectory() as kernels:
        compile_kernels(Path(kernels))
        machine.carry(Path(kernels), KERNELS)


def command(program: str, *arguments: str) -> str:
    """The shell's words for running a program; it needs :data:`VARIABLES`."""
    return shlex.join(["/usr/bin/python3", f"{PLACE}/{program}.py", *(arguments or ("0",))])


_UNIT = """\
[Service]
User={user}
Slice=batch.slice
MemoryMax={most}
WorkingDirectory=/home/{user}
ExecStart={command}
Environment={variables}
StandardOutput=append:/home/{user}/{name}.log
KillMode=control-group
"""


def start_unit(machine: Machine, name: str, user: str, command: str, most: str) -> int:
    """Run a command under the hook as a service, as batch systems do, which has ``most`` memory;
    its pid. Its output is in ``NAME.log`` of the user's home.
    """
    gpu = {
        "LD_LIBRARY_PATH": "/usr/lib/phos/softgpu",
        "LD_PRELOAD": "/usr/lib/phos/libphos_hook.so",
    }
    variables = shlex.join(f"{name}={value}" for name, value in {**VARIABLES, **gpu}.items())
    text = _UNIT.format(name=name, user=user, command=command, variables=variables, most=most)
    log = f"/home/{user}/{name}.log"
    machine.run(f"touch {log} && chown {user}: {log}", unit=False)
    machine.put(_unit_file(name), text)
    machine.run(f"systemctl daemon-reload; systemctl start {name}")
    return int(machine.run(f"systemctl show --property=MainPID --value {name}", unit=False))


def remove_unit(machine: Machine, name: str) -> None:
    machine.run(f"rm {_unit_file(name)}; systemctl daemon-reload")


def _unit_file(name: str) -> str:
    return f"/etc/systemd/system/{name}.service"


@dataclass(frozen=True)
class Target:
    """A running program. ``pid`` is the machine's number for it, ``output`` the path there."""

    machine: Machine
    pid: int
    output: str

    @property
    def _file(self) -> Path:
        return self.machine.tree / self.output.lstrip("/")

    def position(self) -> int:
        """Where its output ends now, in bytes."""
        return self._file.stat().st_size

    def values(self, since: int = 0) -> dict[int, str]:
        """The digest of each step, of its output from byte ``since`` on."""
        return parse(self._file.read_bytes()[since:])

    def more_steps(self, count: int, since: int | None = None) -> dict[int, str]:
        """``count`` values of its output from byte ``since`` on, or from now on."""
        begin = self.position() if since is None else since
        wait_until(lambda: len(self.values(begin)) >= count, f"{count} steps of {self.pid}")
        return self.values(begin)

    @property
    def alive(self) -> bool:
        status = self.machine.run(f"ps -o stat= -p {self.pid}", check=False, unit=False).strip()
        return bool(status) and status[0] not in "ZX"

    def kill(self) -> None:
        """``kill -9``; returns when the pid is free."""
        self.machine.run(f"kill -9 {self.pid}", check=False, unit=False)
        gone = f"test ! -e /proc/{self.pid} && echo gone"
        wait_until(lambda: self.machine.run(gone, check=False, unit=False), f"{self.pid} to go")


def start(
    machine: Machine, user: str = "ann", program: str = "single", *, gpu: str = "--gpu soft"
) -> Target:
    """``phos run`` of a program, with the option ``gpu``; returns when it computes."""
    line = f"phos --json run {gpu} --detach -- {command(program)}"
    said = machine.run(line, user=user, variables=VARIABLES)
    told = json.loads(said.splitlines()[-1])
    target = Target(machine, told["pid"], told["stdout"])
    target.more_steps(3, since=0)
    return target


def require_continuation(target: Target, before: dict[int, str], since: int) -> None:
    """Its output from byte ``since`` on has steps of ``before``, with the same values."""
    wait_until(
        lambda: len(target.values(since).keys() & before.keys()) > 5, "steps that were seen before"
    )
    again = target.values(since)
    common = again.keys() & before.keys()
    assert {step: again[step] for step in common} == {step: before[step] for step in common}


def phos(machine: Machine, words: str, user: str = "root") -> list[dict[str, object]]:
    """The lines of a command of ``phos --json``, which must succeed."""
    said = machine.run(f"phos --json {words}", user=user)
    return [json.loads(line) for line in said.splitlines()]


def restore_after_kill(program: Target, image: object, user: str = "ann") -> None:
    """The program is killed, restored by its user, and computes what it computed before."""
    program.more_steps(10)
    program.kill()
    before, since = program.values(), program.position()
    assert phos(program.machine, f"restore {image}", user)[-1]["result"] == str(program.pid)
    require_continuation(program, before, since)

"""Others save, suspend and start programs while everything that ever fell is tried at once."""

import json
import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from phosd.engine.hook_client.places import IN_CONTAINERS
from phosd.engine.hook_client.wire import (
    HEADER,
    MAGIC,
    PROGRAM_WISH,
    REPLY,
    VERSION,
    Type,
)
from tests.node.checkpoint_restore.conftest import named_shelf
from tests.support.fake_hook import hello
from tests.support.harness import start, wait_until
from tests.system.service.test_end_to_end import phos, phosd

BESIEGERS = Path(__file__).parents[2] / "support" / "besiegers.py"
STRANGERS = pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("daemon").pw_uid
_CONTAINER = (
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec"),
    f"mount -t proc proc /proc && mount -t tmpfs run /run && mkdir -p {IN_CONTAINERS}"
    f' && mount -t tmpfs hook {IN_CONTAINERS} && exec "$0" "$@"',
)
"""Its root, which is the machine's. Two users attack in all ways but this one."""


def _message(kind: int, body: bytes) -> str:
    return (HEADER.pack(MAGIC, VERSION, kind, 1, 0, len(body), 0) + body).hex()


@contextmanager
def besieged(told: Mapping[str, object]) -> Iterator[list[subprocess.Popen[str]]]:
    """Two users and a container's root attack until the end of the block."""
    ways = ("linger", "waylay", "import_from_nobody", "wish", "crowd", "squat", "call")
    attackers: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for way, user in [("lie", 0), *((way, user) for user in STRANGERS for way in ways)]:
            words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
            here = dict(told)
            if way == "lie":
                words = [*_CONTAINER]
                here["run"] = str(Path(IN_CONTAINERS).parent)
            code = BESIEGERS.read_text()
            attacker = subprocess.Popen(
                [*words, "/usr/bin/python3", "-S", "-c", code, way, json.dumps(here)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.callback(_end, attacker)
            attackers.append(attacker)
        for attacker in attackers:
            assert attacker.stdout is not None and attacker.stderr is not None
            assert attacker.stdout.readline() == "begun\n", attacker.stderr.read()
        yield attackers


def _end(attacker: "subprocess.Popen[str]") -> None:
    os.killpg(attacker.pid, signal.SIGKILL)
    attacker.communicate()


def test_others_are_served(bus: str) -> None:
    with tempfile.TemporaryDirectory(prefix="phos-open-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        library = folder / "libcuda.so.1"
        library.write_bytes(bytes(4096))
        run = folder / "run"
        names = [named_shelf(run), Path(f"/tmp/phos-{os.getpid()}")]
        for each in names:
            stack.callback(each.unlink, missing_ok=True)
        told = {
            "run": str(run),
            "bus": bus,
            "library": str(library),
            "request": _message(Type.PROGRAM, PROGRAM_WISH.pack(1, 0, 0)),
            "answer": _message(Type.HELLO | REPLY, hello()),
            "names": [*map(str, names)],
        }
        target = start("single", folder, runtime=run)
        stack.callback(target.kill)
        target.wait_for_steps(2)
        with phosd(bus, folder), besieged(told) as attackers:
            pid = str(target.pid)
            (job,) = phos(bus, folder, "checkpoint", pid)[-1:]
            assert job["state"] == "done"
            image = str(job["result"])
            (job,) = phos(bus, folder, "suspend", pid)[-1:]
            assert job["state"] == "done"
            (job,) = phos(bus, folder, "resume", pid)[-1:]
            assert job["state"] == "done"
            target.more_steps(2)
            for number in range(3):
                run_named = ("run", "--gpu", "soft", "--name", f"n{number}")
                assert {"n": number} in phos(
                    bus, folder, *run_named, "--", "echo", f'{{"n": {number}}}'
                )
            target.kill()
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the program's end")
            (job,) = phos(bus, folder, "restore", image)[-1:]
            assert job["state"] == "done"
            target.more_steps(2)
            assert [attacker.poll() for attacker in attackers] == [None] * len(attackers)
            (row,) = (p for p in phos(bus, folder, "ps") if p["pid"] == target.pid)
            assert (row["hook"], row["state"]) == ("hooked", "running")
        log = (folder / "phosd.log").read_text()
        assert "\n<3>phosd" not in log and "\x1b" not in log

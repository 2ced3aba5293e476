"""A program of ``phos run`` is saved while its relay watches, killed, and restored: it goes on
writing to the same files, whose relay is gone.
"""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phosd.engine.criu.dump import dump as criu_dump
from phosd.engine.criu.dump.dump import DumpOptions
from phosd.engine.criu.restore import admission
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.run.program import Criu
from phosd.engine.program import tree
from tests.node.criu.life import COUNTER, SYSTEM_PYTHON, records
from tests.support.harness import alive, users_hooks, wait_until


def test_a_program_of_phos_run_survives_kill_and_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users_hooks(tmp_path / "run")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program = [SYSTEM_PYTHON, "-S", "-c", f"import os; print(os.getpid());{COUNTER}"]
    command = [sys.executable, "-m", "phosd.cli.main", "run", "--gpu", "soft"]
    command += [f"--runtime-dir={tmp_path / 'run'}", "--", *program]
    shown = tmp_path / "shown"
    with shown.open("wb") as file:
        relay = subprocess.Popen(command, stdout=file)
    pid = int(wait_until(lambda: shown.read_text().partition("\n")[0], "the pid"))
    output = Path(f"/proc/{pid}/fd/1").readlink()
    assert output.parent.parent == tmp_path / "state" / "phos" / "run"

    images = tmp_path / "images"
    images.mkdir(mode=0o700)
    found = Criu.find()
    dump = criu_dump.dump_tree(found, tree.scan(pid), images, DumpOptions())
    record = dump.record("images")
    lines = len(output.read_text().splitlines())
    wait_until(lambda: len(output.read_text().splitlines()) > lines + 3, "the program to go on")
    os.kill(pid, signal.SIGKILL)
    assert relay.wait(timeout=60) == 128 + signal.SIGKILL
    assert shown.read_text() == output.read_text()

    killed_at = output.stat().st_size
    saved = SavedTree(record, records(dump.tree), images)
    admission.admission(found, saved, TreeRestoreOptions())
    restored = criu_restore.restore_tree(found, saved, TreeRestoreOptions())
    try:
        assert (restored.pid, alive(pid)) == (pid, True)
        wait_until(lambda: output.read_bytes()[killed_at:].count(b"\n") > 5, "the restored program")
        after = [int(line) for line in output.read_bytes()[killed_at:].split(b"\n")[:-1]]
        assert all(b == a + 1 for a, b in itertools.pairwise(after))
        # It computes on from the dump: what it printed between that and the kill comes again.
        before = [int(line) for line in shown.read_text().splitlines()[1:]]
        assert after[0] in before
    finally:
        restored.abandon()

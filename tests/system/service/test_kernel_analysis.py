"""The real daemon analyses what real programs launch: once for all users, and not without tools."""

import json
import os
import pwd
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bus import busctl
from tests.support.harness import Target, start, wait_until
from tests.system.service.test_end_to_end import phos, phosd

STRANGER = pwd.getpwnam("nobody").pw_uid
AS_STRANGER = ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups")


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    """A folder that another user can reach."""
    with tempfile.TemporaryDirectory(prefix="phos-open-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def in_hook(rows: dict[str, dict[str, object]]) -> bool:
    return bool(rows) and all(row["in_hook"] for row in rows.values())


def is_whole(entry: Path) -> bool:
    return bool(json.loads(entry.read_bytes())["whole"])


def known(bus: str, folder: Path, target: Target) -> dict[str, dict[str, object]]:
    rows = phos(bus, folder, "ps", str(target.pid), "--kernels")
    return {str(row["kernel"]): row for row in rows}


def test_kernels_are_analysed_once_for_all_users(bus: str, folder: Path) -> None:
    (folder / "phosd.toml").write_text('analysis = "background"\n')
    entries = folder / "state/kernels"
    with phosd(bus, folder):
        mine = start("single", folder, runtime=folder / "run")
        theirs: Target | None = None
        try:
            mine.wait_for_steps(2)
            # Without anybody's asking.
            wait_until(
                lambda: known(bus, folder, mine).get("advance", {}).get("state") == "analysed",
                "the analysis, for which nobody else may want the processor",
                400.0,
            )
            advance = known(bus, folder, mine)["advance"]
            assert advance["roles"] == {"0": "both"}
            assert int(str(advance["launches"])) > 0
            wait_until(lambda: all(map(is_whole, entries.glob("*-90"))), "the rest of the module")
            stamps = {path.name: path.stat().st_ino for path in entries.iterdir()}

            interpreter = (*AS_STRANGER, sys.executable)
            theirs = start("single", folder, runtime=folder / "run", interpreter=interpreter)
            theirs.wait_for_steps(2)
            rows = phos(bus, folder, "analyse", str(theirs.pid), "--seconds", "1")
            assert {str(row["kernel"]): row["roles"] for row in rows}["advance"] == {"0": "both"}
            assert {path.name: path.stat().st_ino for path in entries.iterdir()} == stamps

            both = (mine, theirs)
            wait_until(
                lambda: all(in_hook(known(bus, folder, one)) for one in both), "the hooks' tables"
            )

            path = f"/org/phos/process/_{mine.pid}_{start_time(mine)}"
            with pytest.raises(RuntimeError, match="belongs to uid 0"):
                words = ("org.phos.Process1", "DescribeKernels", "a{sv}", "0")
                busctl(bus, "call", "org.phos", path, *words, uid=STRANGER)
        finally:
            mine.kill()
            if theirs is not None:
                theirs.kill()


def start_time(target: Target) -> int:
    return int(Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_without_tools_all_else_works(bus: str, folder: Path) -> None:
    (folder / "phosd.toml").write_text('analysis = "background"\n')
    hidden = folder / "sitecustomize.py"
    hidden.write_text('import sysconfig\nsysconfig.get_path = lambda *_: "/nonexistent"\n')
    here = os.environ.get("PYTHONPATH", "")
    with phosd(bus, folder, PATH="/usr/bin:/bin", PYTHONPATH=f"{folder}:{here}"):
        target = start("single", folder, runtime=folder / "run")
        try:
            target.wait_for_steps(2)
            saved = phos(bus, folder, "checkpoint", str(target.pid), "--mode", "stop")[-1]
            assert saved["state"] == "done"
            rows = phos(bus, folder, "analyse", str(target.pid), "--seconds", "1")
            assert rows and {row["state"] for row in rows} == {"no-tool"}
            assert "is not installed" in str(rows[0]["reason"])
        finally:
            target.kill()

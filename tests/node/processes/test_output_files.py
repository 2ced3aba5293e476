"""Where a process's output goes."""

import subprocess
from pathlib import Path

from phosd.engine.program.process import output_files


def test_files_and_nothing_else(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("w") as out,
        subprocess.Popen(["sleep", "1000"], stdout=out, stderr=out) as program,
    ):
        assert output_files(program.pid) == (str(tmp_path / "out"),)
        program.kill()
    assert output_files(program.pid) == (), "it has ended"
    with subprocess.Popen(
        ["sleep", "1000"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert output_files(program.pid) == ()
        program.kill()

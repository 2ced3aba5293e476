"""Measure how a program gets to a machine with other GPUs: as a file, and with a restore there.

    python -m bench.elsewhere [--against N] [--state DIR] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``, deterministic. It runs on the last of several GPUs. It is
saved, killed, and its image exported to a file; a second phosd, with a state and a key of its own,
to which that GPU does not exist, imports the file and restores the program. There it is saved
again, and comes back in the same way. Each of the two has printed, after ``N`` lines, what an
undisturbed run prints. As root; the GPU is hidden in a mount namespace. Prints one JSON object.
"""

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoint import gone, kill_tree
from bench.series import undisturbed
from bench.stage import Failed, Phos, Shown, add_options, run, wait_until, words_of
from phosd.engine.system import cuda
from phosd.errors import NoSuchProcess

_LINES = 5
"""Of output before it is saved."""
_PARAMETERS = "/proc/driver/nvidia/params"
_HIDE = f"""
set -e
hidden=$1 folder=$2
shift 2
mkdir "$folder"
if [ -e {_PARAMETERS} ]; then
    # Else the driver's libraries make the missing file themselves.
    sed 's/ModifyDeviceFiles: 1/ModifyDeviceFiles: 0/' {_PARAMETERS} > "$folder/params"
    mount --bind "$folder/params" {_PARAMETERS}
fi
mkdir "$folder/dev"
mount --rbind /dev "$folder/dev"
mount -t tmpfs -o mode=755 tmpfs /dev
for file in "$folder"/dev/*; do
    name="/dev/${{file##*/}}"
    if [ "$name" = "$hidden" ]; then continue; fi
    if [ -L "$file" ]; then cp -P "$file" "$name"; continue; fi
    if [ -d "$file" ]; then mkdir "$name"; else : > "$name"; fi
    mount --rbind "$file" "$name"
done
exec "$@"
"""


def without(gpu: int, folder: Path) -> list[str]:
    """Return the words before a command for which the last GPU, ``gpu``, does not exist."""
    if cuda.is_software():
        return ["env", f"PHOS_SOFTGPU_DEVICES={gpu}"]
    shell = ["sh", "-c", _HIDE, "sh", f"/dev/nvidia{gpu}", str(folder)]
    return ["unshare", "--mount", "--propagation", "private", *shell]


def require_values(shown: Shown, expected: Mapping[int, str]) -> int:
    """Wait for all values; return their number. Raises :class:`Failed` if one is wrong."""
    last = max(expected)
    wait_until(lambda: any(step.number >= last for step in shown.steps()), f"step {last}")
    found = {step.number: step.value for step in shown.steps()}
    if wrong := [number for number, value in expected.items() if found.get(number) != value]:
        raise Failed(f"{shown.file.name}: value {wrong[0]} is wrong or missing")
    return len(expected)


def kill(pid: int) -> None:
    """Kill a program with its process tree, and wait until its pids are free."""
    tree = kill_tree(pid)
    wait_until(lambda: gone(tree), "the pids to be free")


def timed(phos: Phos, *words: str) -> tuple[dict[str, Any], float]:
    """Run a command; return the last of its objects, and its seconds."""
    began = time.monotonic()
    told = phos.do(*words)
    return told[-1], round(time.monotonic() - began, 2)


def gpus_of(phos: Phos, pid: int) -> list[int]:
    """Return the GPUs that a program uses, as its phosd numbers them."""
    (told,) = phos.do("ps", str(pid))
    return [int(gpu["ordinal"]) for gpu in told["gpus"]]


class Journey:
    """A program that goes from one phosd to another as a file, and back.

    Both have the same runtime folder, as on two machines, so only one runs at a time.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.pid = 0
        self._folder = folder
        self._file = folder / "image.phos"
        self._settings = settings

    def phosd(self, name: str, apart: Sequence[str] = ()) -> Phos:
        """Return the phosd that has its state in the folder ``name``."""
        return Phos(self._folder, self._folder / name, self._settings, apart=apart)

    def leave(self, phos: Phos) -> dict[str, Any]:
        """Save the program, kill it and write its image to the file; return figures."""
        row: dict[str, Any] = {"gpus": gpus_of(phos, self.pid)}
        saved, row["checkpoint_s"] = timed(phos, "checkpoint", str(self.pid))
        kill(self.pid)
        _, row["export_s"] = timed(phos, "export", saved["result"], str(self._file))
        return row | {"file_bytes": self._file.stat().st_size}

    def arrive(self, phos: Phos) -> dict[str, Any]:
        """Import the file, and restore the program; return figures."""
        row: dict[str, Any] = {}
        imported, row["import_s"] = timed(phos, "import", str(self._file), "--trust")
        self._file.unlink()
        restored, row["restore_s"] = timed(phos, "restore", imported["image"])
        self.pid = int(restored["result"])
        return row | {"gpus": gpus_of(phos, self.pid)}


def measure(arguments: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Send the program there and back; fill the report."""
    arguments.torchrun = 0
    expected = undisturbed(folder, arguments)
    journey = Journey(folder, f'memory_tier = "{arguments.memory_tier}"\n')
    try:
        with journey.phosd("first") as phos:
            last = len(phos.do("gpus")) - 1
            if last < 1:
                raise Failed("this needs two GPUs")
            words = words_of(arguments.program)
            journey.pid, output = phos.run(words, {"CUDA_VISIBLE_DEVICES": str(last)})
            shown = Shown(output)
            wait_until(lambda: len(shown.steps()) >= _LINES, "the first lines")
            report["leaves_first"] = journey.leave(phos)
        with journey.phosd("second", without(last, folder / "hidden")) as phos:
            report["gpus_of_second"] = len(phos.do("gpus"))
            report["arrives_at_second"] = journey.arrive(phos)
            before = len(shown.steps())
            wait_until(lambda: len(shown.steps()) >= before + _LINES, "lines of the second")
            report["leaves_second"] = journey.leave(phos)
        with journey.phosd("first") as phos:
            report["arrives_at_first"] = journey.arrive(phos)
            report["values_equal"] = require_values(shown, expected)
    finally:
        if journey.pid:
            with contextlib.suppress(NoSuchProcess):
                kill(journey.pid)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=int, default=40, help="lines (%(default)s)")
    add_options(parser)
    run(measure, parser.parse_args(), {})


if __name__ == "__main__":
    main()

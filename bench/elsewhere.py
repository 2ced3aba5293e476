"""Measure how a program gets to a machine with other GPUs: as a file, and with a restore there.

    python -m bench.elsewhere [--against N] [--state DIR] -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``, deterministic. It runs where all GPUs but the first are
hidden. It is saved, killed, and its image exported to a file; a second phosd, with a state and a
key of its own and all GPUs, imports the file and restores the program on the last of them. There it
is saved again. The first one refuses that image, since it has fewer GPUs, and the program goes on
where it was. It has printed, after ``N`` lines, what an undisturbed run prints. As root; GPUs are
hidden in a mount namespace. Prints one JSON object.
"""

import argparse
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.series import undisturbed
from bench.stage import (
    Failed,
    Phos,
    Refused,
    Shown,
    add_options,
    end_tree,
    run,
    wait_until,
    words_of,
)
from phosd.engine.system import cuda
from phosd.errors import NoSuchProcess

_LINES = 5
"""Of output before it is saved."""
_PARAMETERS = "/proc/driver/nvidia/params"
_HIDE = f"""
set -e
folder=$(mktemp -d "$1/hidden.XXXXXX")
shift
if [ -e {_PARAMETERS} ]; then
    # Else the driver's libraries make the missing files themselves.
    sed 's/ModifyDeviceFiles: 1/ModifyDeviceFiles: 0/' {_PARAMETERS} > "$folder/params"
    mount --bind "$folder/params" {_PARAMETERS}
fi
mkdir "$folder/dev"
mount --rbind /dev "$folder/dev"
mount -t tmpfs -o mode=755 tmpfs /dev
for file in "$folder"/dev/*; do
    name="/dev/${{file##*/}}"
    case "$name" in /dev/nvidia[1-9]*) continue ;; esac
    if [ -L "$file" ]; then cp -P "$file" "$name"; continue; fi
    if [ -d "$file" ]; then mkdir "$name"; else : > "$name"; fi
    mount --rbind "$file" "$name"
done
exec "$@"
"""


def with_one_gpu(folder: Path) -> dict[str, Any]:
    """Return how a phosd and its commands (:class:`Phos`) are started to have only GPU 0."""
    if cuda.is_software():
        words = ["env", "PHOS_SOFTGPU_DEVICES=1"]
        return {"apart": words, "join": lambda _: words}
    hide = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _HIDE, "sh", str(folder)]

    def join(pid: int) -> list[str]:
        enter = ["nsenter", "--mount", f"--target={pid}"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd())]

    return {"apart": hide, "join": join}


def require_values(shown: Shown, expected: Mapping[int, str]) -> int:
    """Wait for all values; return their number. Raises :class:`Failed` if one is wrong."""
    last = max(expected)
    wait_until(lambda: any(step.number >= last for step in shown.steps()), f"step {last}")
    found = {step.number: step.value for step in shown.steps()}
    if wrong := [number for number, value in expected.items() if found.get(number) != value]:
        raise Failed(f"{shown.file.name}: value {wrong[0]} is wrong or missing")
    return len(expected)


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
    """A program that goes from one phosd to another as a file.

    Both have the same runtime folder, as on two machines, so only one runs at a time.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.pid = 0
        self._folder = folder
        self._file = folder / "image.phos"
        self._settings = settings

    def small(self) -> Phos:
        """Return the phosd that has one GPU."""
        alone = with_one_gpu(self._folder)
        return Phos(self._folder, self._folder / "small", self._settings, **alone)

    def large(self) -> Phos:
        """Return the phosd that has all GPUs."""
        return Phos(self._folder, self._folder / "large", self._settings)

    def leave(self, phos: Phos) -> dict[str, Any]:
        """Save the program, kill it and write its image to the file; return figures."""
        row: dict[str, Any] = {"gpus": gpus_of(phos, self.pid)}
        saved, row["checkpoint_s"] = timed(phos, "checkpoint", str(self.pid))
        end_tree(self.pid)
        _, row["export_s"] = timed(phos, "export", saved["result"], str(self._file))
        return row | {"file_bytes": self._file.stat().st_size}

    def arrive(self, phos: Phos, *options: str) -> dict[str, Any]:
        """Import the file, and restore the program; return figures."""
        row: dict[str, Any] = {}
        imported, row["import_s"] = timed(phos, "import", str(self._file), "--trust")
        self._file.unlink()
        restored, row["restore_s"] = timed(phos, "restore", imported["image"], *options)
        self.pid = int(restored["result"])
        return row | {"gpus": gpus_of(phos, self.pid)}

    def refused(self, phos: Phos) -> str:
        """Return the words with which the file is refused. Raises :class:`Failed` if it is not."""
        try:
            phos.do("import", str(self._file), "--trust")
        except Refused as error:
            return str(error).splitlines()[-1]
        raise Failed("it was imported where the driver cannot restore it")


def measure(arguments: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Send the program to the other machine; fill the report."""
    arguments.torchrun = 0
    expected = undisturbed(folder, arguments)
    journey = Journey(folder, f'memory_tier = "{arguments.memory_tier}"\n')
    try:
        with journey.small() as phos:
            if (count := len(phos.do("gpus"))) != 1:
                raise Failed(f"{count} GPUs, of which one was to be left")
            journey.pid, output = phos.run(words_of(arguments.program))
            shown = Shown(output)
            wait_until(lambda: len(shown.steps()) >= _LINES, "the first lines")
            report["leaves"] = journey.leave(phos)
        with journey.large() as phos:
            last = len(phos.do("gpus")) - 1
            if last < 1:
                raise Failed("this needs two GPUs")
            report["arrives_elsewhere"] = journey.arrive(phos, "--gpu", f"0:{last}")
            before = len(shown.steps())
            wait_until(lambda: len(shown.steps()) >= before + _LINES, "lines from there")
            report["leaves_there"] = journey.leave(phos)
        with journey.small() as phos:
            report["refused_by_fewer"] = journey.refused(phos)
        with journey.large() as phos:
            report["goes_on_there"] = journey.arrive(phos)
            report["values_equal"] = require_values(shown, expected)
    finally:
        if journey.pid:
            with contextlib.suppress(NoSuchProcess):
                end_tree(journey.pid)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=int, default=40, help="lines (%(default)s)")
    add_options(parser)
    run(measure, parser.parse_args(), {})


if __name__ == "__main__":
    main()

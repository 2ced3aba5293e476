"""Measure how a program gets to a machine with other GPUs: as a file, and with a restore there.

    python -m bench.elsewhere [--against N] [--memory-tier SIZE] [--state DIR]
        -- PROGRAM [ARGUMENTS]

PROGRAM is one of ``bench/programs``, deterministic. It runs where all GPUs but the first are
hidden. It is saved and killed, and its image exported to a file. That is imported, by phosds with
states and keys of their own, and restored where there is one other GPU; where there are all, on the
same one; and there on the last one, where it is saved again. The first phosd refuses that image,
since it has fewer GPUs, and the program goes on where it was. It has printed, after ``N`` lines,
what an undisturbed run prints. As root; GPUs are hidden in a mount namespace. Prints one JSON
object.
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
"""Lines of output before it is saved."""
_PARAMETERS = "/proc/driver/nvidia/params"
_HIDE = f"""
set -e
folder=$(mktemp -d "$1/hidden.XXXXXX")
left=$2
shift 2
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
    case "$name" in "$left") ;; /dev/nvidia[0-9]*) continue ;; esac
    if [ -L "$file" ]; then cp -P "$file" "$name"; continue; fi
    if [ -d "$file" ]; then mkdir "$name"; else : > "$name"; fi
    mount --rbind "$file" "$name"
done
exec "$@"
"""


def with_one_gpu(folder: Path, gpu: int) -> dict[str, Any]:
    """Return how a phosd and its commands (:class:`Phos`) are started to have only one GPU."""
    if cuda.is_software():
        words = ["env", "PHOS_SOFTGPU_DEVICES=1"]
        if gpu:
            words.append(f"PHOS_SOFTGPU_MACHINE={gpu}")
        return {"apart": words, "join": lambda _: words}
    hide = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _HIDE, "sh"]

    def join(pid: int) -> list[str]:
        enter = ["nsenter", "--mount", f"--target={pid}"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd())]

    return {"apart": [*hide, str(folder), f"/dev/nvidia{gpu}"], "join": join}


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

    All have the same runtime folder, as on several machines, so only one runs at a time.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.pid = 0
        self._folder = folder
        self._file = folder / "image.phos"
        self._settings = settings

    def small(self, gpu: int = 0) -> Phos:
        """Return the phosd that has one GPU."""
        alone = with_one_gpu(self._folder, gpu)
        return Phos(self._folder, self._folder / f"small-{gpu}", self._settings, **alone)

    def large(self) -> Phos:
        """Return the phosd that has all GPUs."""
        return Phos(self._folder, self._folder / "large", self._settings)

    def leave(self, phos: Phos) -> dict[str, Any]:
        """Save the program, kill it and write its image to the file; return figures."""
        row: dict[str, Any] = {"gpus": gpus_of(phos, self.pid)}
        saved, row["checkpoint_s"] = timed(phos, "checkpoint", str(self.pid))
        self.end()
        self._file.unlink(missing_ok=True)
        _, row["export_s"] = timed(phos, "export", saved["result"], str(self._file))
        return row | {"file_bytes": self._file.stat().st_size}

    def end(self) -> None:
        """Kill the program, if it runs."""
        pid, self.pid = self.pid, 0
        if pid:
            with contextlib.suppress(NoSuchProcess):
                end_tree(pid)

    def arrive(self, phos: Phos, shown: Shown, *options: str) -> dict[str, Any]:
        """Import the file, and restore the program; return figures, after some lines."""
        row: dict[str, Any] = {}
        imported, row["import_s"] = timed(phos, "import", str(self._file), "--trust")
        return row | self.restored(phos, imported["image"], shown, *options)

    def restored(self, phos: Phos, image: str, shown: Shown, *options: str) -> dict[str, Any]:
        """Restore the program; return figures, after some lines."""
        before = len(shown.steps())
        restored, seconds = timed(phos, "restore", image, *options)
        self.pid = int(restored["result"])
        wait_until(lambda: len(shown.steps()) >= before + _LINES, "lines from there")
        return {"image": image, "restore_s": seconds, "gpus": gpus_of(phos, self.pid)}

    def refused(self, phos: Phos) -> str:
        """Return the words with which the file is refused. Raises :class:`Failed` if it is not."""
        try:
            phos.do("import", str(self._file), "--trust")
        except Refused as error:
            return str(error).splitlines()[-1]
        raise Failed("it was imported where the driver cannot restore it")


def measure(arguments: argparse.Namespace, folder: Path, report: dict[str, Any]) -> None:
    """Send the program to the other machines; fill the report."""
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
        with journey.small(1) as phos:
            report["arrives_at_one_other"] = journey.arrive(phos, shown)
            journey.end()
        with journey.large() as phos:
            last = len(phos.do("gpus")) - 1
            if last < 1:
                raise Failed("this needs two GPUs")
            there = report["arrives_where_more_are"] = journey.arrive(phos, shown, "--gpu", "0:0")
            journey.end()
            report["arrives_at_another_of_more"] = journey.restored(
                phos, there["image"], shown, "--gpu", f"0:{last}"
            )
            report["leaves_there"] = journey.leave(phos)
        with journey.small() as phos:
            report["refused_by_fewer"] = journey.refused(phos)
        with journey.large() as phos:
            report["goes_on_there"] = journey.arrive(phos, shown)
            report["values_equal"] = require_values(shown, expected)
    finally:
        journey.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=int, default=40, help="lines (%(default)s)")
    add_options(parser)
    run(measure, parser.parse_args(), {})


if __name__ == "__main__":
    main()

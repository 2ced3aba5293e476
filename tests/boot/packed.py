"""Play the package in a booted Debian on a machine with a GPU, without systemd and network.

::

    python -m tests.boot.packed pack FOLDER    # as root, where Debian's archive can be reached
    python -m tests.boot.packed play FOLDER    # as root, on the machine with the GPU

``FOLDER`` gets the Debian, the package and compiled kernels, some 60 MB. The machine needs this
checkout, and what ``phosd`` and ``tests.support.harness`` import. Its NVIDIA driver is copied into
the Debian, and its devices are bound there; without a GPU the software GPU is used. What is played
are checkpoints of an ordinary user's programs in each mode, kills and restores whose values are
compared, suspensions, and ``kill -9`` of phosd during checkpoints, under the units as they are
shipped. Ends with "all is well", or with an error and the journal.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.boot import machine, target
from tests.boot.conftest import SUITES
from tests.boot.machine import Machine
from tests.boot.package import REPOSITORY, build_package, install
from tests.support.harness import PROGRAMS, compile_kernels

MODES = ("stop", "concurrent", "recopy", "driver")
PLAYED = ("single", "features")
KILLS = 3
"""Kills of phosd, beside each program."""
_NEEDLESS = ("doc", "man", "locale", "info", "zoneinfo", "i18n")
_TREE, _KERNELS = "tree.tar.xz", "kernels"
_BUNDLED = "/usr/lib/phos/python"
"""The package's own Python packages: those of the machine are for another Python."""


def pack(folder: Path) -> None:
    """Make what :func:`play` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    build_package(folder)
    (folder / _KERNELS).mkdir(exist_ok=True)
    compile_kernels(folder / _KERNELS)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        packages = ",".join((*machine.PACKAGES, "systemd-container"))
        script = REPOSITORY / "tests/setup/debian_tree.sh"
        subprocess.run([script, SUITES[sys.version_info[:2]], tree, packages], check=True)
        machine.prepare(tree)
        for name in _NEEDLESS:
            shutil.rmtree(tree / "usr/share" / name, ignore_errors=True)
        command: Sequence[str | Path] = ["tar", "--create", "--xz", "--file", folder / _TREE]
        threads = os.environ | {"XZ_OPT": "-6 -T0"}
        subprocess.run([*command, "--directory", tree, "."], check=True, env=threads)


def play(folder: Path) -> None:
    """Boot, install, and use the package."""
    real = Path("/dev/nvidia0").exists()
    target.VARIABLES |= {"PYTHONPATH": _BUNDLED}
    with tempfile.TemporaryDirectory(prefix="packed-") as scratch:
        base = Path(scratch) / "base"
        base.mkdir()
        subprocess.run(
            ["tar", "--extract", "--file", folder / _TREE, "--directory", base], check=True
        )
        if not shutil.which("systemd-nspawn"):
            _borrow(base)
        nodes = [path for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
        machine.BINDS += [f"--bind={node}" for node in nodes]
        with machine.booted(base, _bring_driver if real else lambda tree: None) as booted:
            try:
                _play_in(booted, folder, "" if real else "--gpu soft")
            except BaseException:
                print(booted.last_words())
                raise


def _borrow(base: Path) -> None:
    """Make this machine use the tree's ``systemd-nspawn`` and ``journalctl``, and give it the id
    that these ask for.
    """
    libraries = base / "usr/lib/x86_64-linux-gnu"
    for program in ("usr/bin/systemd-nspawn", "bin/journalctl"):
        path = Path("/usr/local/bin") / Path(program).name
        loader = f"{libraries}/ld-linux-x86-64.so.2 --library-path {libraries}:{libraries}/systemd"
        path.write_text(f'#!/bin/sh\nexec {loader} {base}/{program} "$@"\n')
        path.chmod(0o755)
    known = Path("/etc/machine-id")
    if not known.exists() or not known.read_text().strip():
        known.write_text(f"{os.urandom(16).hex()}\n")
    if not os.path.ismount("/run"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)


def _bring_driver(tree: Path) -> None:
    """Copy the libraries of this machine's NVIDIA driver into a tree."""
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name, path in re.findall(r"(?m)^\s*(\S+) \(.*x86-64.*\) => (\S+)$", known):
        there = tree / "usr/lib/x86_64-linux-gnu" / name
        if name.startswith(("libcuda.so", "libnvidia-")) and not there.exists():
            shutil.copyfile(path, there)
            there.chmod(0o755)


def _play_in(booted: Machine, folder: Path, gpu: str) -> None:
    booted.carry(folder / _KERNELS, target.KERNELS)
    booted.carry(PROGRAMS, target.PLACE)
    (package,) = folder.glob("phosd_*.deb")
    if gpu:
        unit = "/etc/systemd/system/phosd.service.d/gpu.conf"
        booted.put(unit, "[Service]\nEnvironment=PHOS_GPU=soft\n")
    install(booted, package)
    print(booted.run("phos doctor", check=False))
    for program in PLAYED:
        played = target.start(booted, program=program, gpu=gpu)
        for mode in MODES:
            said = target.phos(booted, f"checkpoint {played.pid} --mode {mode}", "ann")
            played.more_steps(3)
            target.restore_after_kill(played, said[-1]["result"])
            print(f"{program}: {mode}: saved, killed, restored, the same values", flush=True)
        target.phos(booted, f"suspend {played.pid}", "ann")
        target.phos(booted, f"resume {played.pid}", "ann")
        played.more_steps(3)
        print(f"{program}: suspended and resumed", flush=True)
        for number in range(KILLS):
            call = f"Checkpoint 'ua{{sv}}' {played.pid} 0"
            booted.run(f"busctl call org.phos /org/phos org.phos.Manager1 {call}", user="ann")
            time.sleep(0.2 + 0.4 * number)
            booted.run("systemctl kill --signal=KILL phosd.service", unit=False)
            played.more_steps(3)
            last = target.phos(booted, "history")[0]
            print(f"{program}: phosd killed, the program computes; {last['state']}", flush=True)
        said = target.phos(booted, f"checkpoint {played.pid}", "ann")
        target.restore_after_kill(played, said[-1]["result"])
        played.kill()
    print("all is well")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["pack", "play"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    (pack if arguments.action == "pack" else play)(arguments.folder)


if __name__ == "__main__":
    main()

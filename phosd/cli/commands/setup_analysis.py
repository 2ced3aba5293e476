"""Implement ``phos setup-analysis``: install NVIDIA's tools beside a phosd of a system's package.

The tools are NVIDIA's and may not be part of phosd. pip fetches them, since it knows the mirrors,
proxies and folders that the administrator has set; what it fetches is known by its digest.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from phosd import installation
from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.engine.analysis.code import tools
from phosd.engine.analysis.code.tools import Tool

_WHEELS_OF_DEBIAN = Path("/usr/share/python-wheels")
_SAID = 300
"""Characters of what a program said that an error repeats."""


@dataclass(frozen=True)
class Source:
    """The wheel that a tool comes in, of the version that phosd was tested with."""

    tool: Tool
    package: str
    version: str
    sha256: str
    megabytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SOURCES = (
    Source(
        Tool.NVDISASM,
        "nvidia-cuda-nvdisasm",
        "13.5.37",
        "d3fdbdd49fa53e2e4aacd3db8259d052bd2b049ececdcb69e92e083c6728e7ca",
        5,
    ),
    Source(
        Tool.PTXAS,
        "nvidia-cuda-nvcc",
        "13.0.88",
        "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        37,
    ),
)


@command(name="setup-analysis")
@click.option("--undo", is_flag=True, help="Delete the tools that it has installed.")
def setup_analysis(settings: Settings, undo: bool) -> None:
    """Install NVIDIA's tools that read kernels. phosd then knows which memory a kernel reads and
    writes. The tools are nvdisasm and ptxas, in the versions that phosd was tested with; NVIDIA's
    licence is put beside them. Needs root.

    pip fetches them from the package index, or from where its settings say. Only what has the
    known digest is installed. phosd uses the tools without a restart.

    \b
    Examples:
      phos setup-analysis
      phos setup-analysis --undo

    \b
    Without a network, fetch them on another machine, and bring the folder here:
      pip download --no-deps --dest tools nvidia-cuda-nvdisasm==13.5.37 nvidia-cuda-nvcc==13.0.88
      PIP_NO_INDEX=1 PIP_FIND_LINKS=tools phos setup-analysis
    """
    if installation.kind() is not installation.Kind.PACKAGE:
        way = installation.how_to_get("analysis", packaged="phos setup-analysis")
        raise CommandError("Unsupported", f"this phosd is no package of the system; {way} does it")
    if os.geteuid() != 0:
        raise CommandError("NotAuthorized", "only root may install tools; run it with sudo")
    if undo:
        there = tools.ADDED.exists()
        shutil.rmtree(tools.ADDED, ignore_errors=True)
        _tell(settings, deleted=[str(tools.ADDED)] if there else [])
        return
    if not settings.json:
        total = sum(source.megabytes for source in SOURCES)
        wanted = " and ".join(f"{source.package} {source.version}" for source in SOURCES)
        settings.note(f"fetching {wanted} ({total} MB); NVIDIA's licence holds for them")
    try:
        _install(_pip(), show=not settings.json and sys.stderr.isatty())
    except OSError as error:
        raise CommandError(
            "Internal", f"{tools.ADDED} cannot be made: {error}; mend that, and try again"
        ) from error
    _tell(settings, installed=[str(tools.ADDED / source.tool.value) for source in SOURCES])


def _tell(
    settings: Settings, *, installed: Sequence[str] = (), deleted: Sequence[str] = ()
) -> None:
    if settings.json:
        settings.emit({"installed": [*installed], "deleted": [*deleted]})
    elif installed:
        settings.facts({"installed": ", ".join(installed)})
    else:
        settings.facts({"deleted": ", ".join(deleted) or "nothing"})


def _pip() -> list[str]:
    """Return the command that is pip, which a system may have as a wheel alone."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-I", "-m", "pip"]
    if found := sorted(_WHEELS_OF_DEBIAN.glob("pip-*.whl")):
        return [sys.executable, "-I", str(found[-1] / "pip")]
    raise CommandError(
        "Unsupported", "pip is not installed; `apt install python3-pip`, and try again"
    )


def _install(pip: list[str], show: bool) -> None:
    """Fetch the tools into a folder beside, see that they run, and put them in place."""
    with tempfile.TemporaryDirectory(prefix=".analysis-", dir=tools.ADDED.parent) as scratch:
        fetched = Path(scratch)
        wanted = fetched / "requirements.txt"
        wanted.write_text(
            "".join(f"{each.requirement} --hash=sha256:{each.sha256}\n" for each in SOURCES)
        )
        _fetch([*pip, "install", "--target", str(fetched), "--requirement", str(wanted)], show)
        ready = fetched / "ready"
        ready.mkdir()
        for source in SOURCES:
            for path, name in _parts(source, fetched):
                shutil.move(path, ready / name)
            tool = ready / source.tool.value
            tool.chmod(0o755)
            _require_that_it_runs(source, tool)
        ready.chmod(0o755)
        shutil.rmtree(tools.ADDED, ignore_errors=True)
        ready.rename(tools.ADDED)


def _fetch(install: list[str], show: bool) -> None:
    """Run pip; show what it says, or repeat the end of that in an error."""
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile"]
    options += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    options += ["--root-user-action", "ignore", *([] if show else ["--quiet"])]
    said = None if show else subprocess.PIPE
    done = subprocess.run([*install, *options], stdout=sys.stderr if show else said, stderr=said)
    if done.returncode != 0:
        last = (done.stderr or b"").decode(errors="replace").strip().rpartition("\n")[2]
        why = f": {last[:_SAID]}" if last else ""
        raise CommandError(
            "RemoteFailed",
            f"pip could not fetch the tools{why}; mend that, or see `phos setup-analysis --help` "
            "for a machine without a network",
        )


def _parts(source: Source, folder: Path) -> list[tuple[Path, str]]:
    """Return the tool among what was fetched, and its licence, each with its name from now on."""
    (tool,) = folder.glob(f"nvidia/*/bin/{source.tool.value}")
    information = f"{source.package.replace('-', '_')}-{source.version}.dist-info"
    texts = [path for path in (folder / information).rglob("*") if "licen" in path.name.lower()]
    licences = [path for path in texts if path.is_file()]
    return [(tool, tool.name), *((path, f"{source.tool.value}.{path.name}") for path in licences)]


def _require_that_it_runs(source: Source, tool: Path) -> None:
    """Raise :class:`CommandError` if the tool does not say its version."""
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0 or not re.search(r"\d+\.\d+", done.stdout):
        raise CommandError(
            "Unsupported",
            f"{source.requirement} does not run on this machine ({source.tool.value} --version "
            f"ended with {done.returncode}): {done.stderr.strip()[:_SAID]}",
        )

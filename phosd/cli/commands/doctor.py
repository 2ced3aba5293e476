"""Implement ``phos doctor``: check what phosd needs, and suggest remedies."""

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from phosd import __version__
from phosd.bus import ROOT, CallError, NoBusError
from phosd.cli.command import command
from phosd.cli.run_command.environment import DEFAULT_RUNTIME
from phosd.cli.settings import Settings
from phosd.client.daemon import Daemon, Properties
from phosd.client.errors import Exit, of_bus
from phosd.client.storage import Storage
from phosd.client.text import human_bytes
from phosd.engine.analysis.code.tools import Tool, find
from phosd.engine.criu.probe import probe
from phosd.engine.criu.run.program import INSTALL_HINT, Criu
from phosd.engine.node import gpus
from phosd.engine.node.known_drivers import SETTING, defect_of
from phosd.engine.recovery.stranded import stranded
from phosd.engine.system import cuda
from phosd.engine.system.native import digest_library, hook_library, softgpu_folder
from phosd.errors import PhosError
from phosd.interface.manager import MANAGER

_T = TypeVar("_T")
_LEAST_DRIVER = 13_000
"""CUDA 13.0: the driver API of r580, the first whose checkpoints phosd relies on."""
_LEAST_SPACE = 10 << 30
_STATE_DIR = Path("/var/lib/phos")
_RUNTIMES = ("runc", "crun")
"""What starts CRIU for containers."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``level`` is ok, warning or error; ``mend`` says what to do."""

    subject: str
    level: str
    text: str
    mend: str = ""


def _ok(subject: str, text: str) -> Finding:
    return Finding(subject, "ok", text)


@command()
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, readable=False),  # only root can read it
    help="Where phosd keeps images (default: where it says, or /var/lib/phos).",
)
def doctor(settings: Settings, state_dir: Path | None) -> None:
    """Check that this machine can save programs. It looks at everything that checkpoints need, and
    works without phosd running.

    Exits with 1 when something is missing without which nothing can be saved.

    \b
    Examples:
      phos doctor
      phos doctor --json | jq 'select(.level != "ok")'
    """
    findings = [
        _system(),
        *_native(),
        *_gpu(),
        _criu(),
        _hook_folder(),
        _space(settings, state_dir),
        *_daemon(settings),
        *_stranded(),
        *_containers(),
        _analysis(),
    ]
    for finding in findings:
        _show(settings, finding)
    if any(finding.level == "error" for finding in findings):
        sys.exit(Exit.FAILED)


def _show(settings: Settings, finding: Finding) -> None:
    if settings.json:
        settings.emit(
            {
                "subject": finding.subject,
                "level": finding.level,
                "text": finding.text,
                "mend": finding.mend,
            }
        )
        return
    style = {"ok": "green", "warning": "yellow", "error": "bold red"}[finding.level]
    settings.out.print(f"[{style}]{finding.level:<8}[/]", end="")
    settings.say(f"{finding.subject:<13}{finding.text}")
    if finding.mend:
        settings.say(f"{'':<21}-> {finding.mend}")


def _system() -> Finding:
    text = f"phosd {__version__}, Python {platform.python_version()}, Linux {platform.release()}"
    if os.geteuid() != 0:
        return Finding(
            "system", "warning", f"{text}; not root", "phosd itself needs root; `phos run` does not"
        )
    return _ok("system", text)


def _native() -> list[Finding]:
    def look(subject: str, find: Callable[[], Path]) -> Finding:
        try:
            return _ok(subject, str(find()))
        except PhosError as error:
            return Finding(subject, "error", error.what, error.hint)

    return [look("hook", hook_library), look("digest", digest_library)]


def _gpu() -> list[Finding]:
    try:
        cuda.driver()
        version = cuda.driver_version()
        found = gpus.list_gpus()
    except PhosError as error:
        return [Finding("gpu", "error", error.what, error.hint)]
    text = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if cuda.is_software():
        findings = [
            Finding(
                "driver",
                "warning",
                f"no NVIDIA driver; programs get the software GPU ({softgpu_folder()}), {text}",
                "for a real GPU install the NVIDIA driver r580 or newer",
            )
        ]
    elif version < _LEAST_DRIVER:
        findings = [
            Finding("driver", "error", f"the driver speaks {text}", "install driver r580 or newer")
        ]
    else:
        findings = [_release(text)]
    for gpu in found:
        memory = human_bytes(gpu.memory_total)
        findings.append(_ok("gpu", f"{gpu.ordinal}: {gpu.name}, {memory}, {gpu.uuid}"))
    return findings


def _release(text: str) -> Finding:
    """Tell the driver's release, of which it may be known that it ends programs."""
    release = gpus.driver_release()
    if (defect := defect_of(release)) is None:
        return _ok("driver", f"{release}, {text}")
    return Finding(
        "driver",
        "error",
        f"{release}, {text}: {defect.what} ({defect.source}), so programs are neither saved nor "
        "moved",
        f"install another release; `{SETTING} = true` in phosd.toml has this one used all the same",
    )


def _criu() -> Finding:
    """Check CRIU by a dump and restore of a real program: nothing else shows whether it works on
    this kernel.
    """
    try:
        criu = Criu.find()
        text = f"{criu.version} ({criu.path})"
        if os.geteuid() != 0:
            return Finding("criu", "warning", text, "run this as root to see whether it works")
        verdict = probe(criu)
    except PhosError as error:
        return Finding("criu", "error", error.what, error.hint)
    if not verdict.works:
        return Finding("criu", "error", f"{text} does not work: {verdict.reason}", INSTALL_HINT)
    return _ok("criu", f"{text} saved and restored a program with sockets here")


def _hook_folder() -> Finding:
    folder = Path(os.environ.get("PHOS_RUNTIME_DIR", DEFAULT_RUNTIME)) / "hook"
    if not folder.is_dir():
        return Finding(
            "runtime", "warning", f"{folder} is not there", "phosd makes it when it starts"
        )
    own = folder / str(os.getuid())  # phosd makes it for the first program that asks
    if own.exists() and not os.access(own, os.W_OK | os.X_OK):
        return Finding(
            "runtime", "error", f"{own} is not writable for you", f"remove {own} as root"
        )
    return _ok("runtime", str(folder))


def _stranded() -> list[Finding]:
    """Report processes that a killed phosd or another tool left locked, checkpointed or parked."""
    runtime_dir = Path(os.environ.get("PHOS_RUNTIME_DIR", DEFAULT_RUNTIME))
    try:
        found = stranded(runtime_dir)
    except PhosError as error:
        return [Finding("processes", "warning", error.what, error.hint)]
    if not found:
        return [_ok("processes", "none is left locked, checkpointed or parked")]
    return [
        Finding(
            "processes",
            "error" if each.certain else "warning",
            f"process {each.pid} is {each.why}",
            f"`phos recover {each.pid}`, as root"
            if each.certain
            else "see what it, or its file system, waits for",
        )
        for each in found
    ]


def _containers() -> list[Finding]:
    """Look for what CRIU starts in a container with a network of its own; nothing is said where
    there are no containers.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    runtimes = [name for name in _RUNTIMES if shutil.which(name, path=path)]
    if not runtimes:
        return []
    if (found := shutil.which("iptables-restore", path=path)) is None:
        return [
            Finding(
                "containers",
                "warning",
                f"{' and '.join(runtimes)} cannot save containers with a network of their own: "
                "CRIU finds no iptables-restore",
                "apt-get install iptables",
            )
        ]
    return [_ok("containers", f"{found}, for networks of containers that {runtimes[0]} saves")]


def _analysis() -> Finding:
    """Look for what kernels are analysed with, which is not part of phosd."""
    try:
        found = [str(find(tool)) for tool in Tool]
    except PhosError as error:
        text = f"{error.what}, so it is not known what kernels read and write; all else works"
        return Finding("analysis", "warning", text, error.hint)
    return _ok("analysis", ", ".join(found))


def _space(settings: Settings, state_dir: Path | None) -> Finding:
    storage = None if state_dir is not None else _storage(settings)
    if storage is not None:
        free, text = storage.free, f"{human_bytes(storage.free)} free where phosd keeps images"
    else:
        place = state_dir or _STATE_DIR
        existing = next(path for path in (place, *place.parents) if _visible(path))
        free = shutil.disk_usage(existing).free
        text = f"{human_bytes(free)} free for images in {place}"
    if free < _LEAST_SPACE:
        return Finding(
            "space", "warning", text, "an image needs the program's device and host memory"
        )
    return _ok("space", text)


def _storage(settings: Settings) -> Storage | None:
    """Ask phosd, if it answers."""

    async def storage(daemon: Daemon) -> Storage:
        return Storage(*await daemon.ask(ROOT, MANAGER, "GetStorage"))

    with suppress(NoBusError, CallError):
        return _answer(settings, storage)
    return None


def _answer(settings: Settings, ask: Callable[[Daemon], Coroutine[Any, Any, _T]]) -> _T:
    """Ask phosd if it runs; it is not started for that. Raises :class:`CallError` and
    :class:`NoBusError`.
    """

    async def asked() -> _T:
        with closing(await Daemon.open(settings.bus)) as daemon:
            await daemon.owner()
            return await ask(daemon)

    return asyncio.run(asked())


def _visible(path: Path) -> bool:
    """Whether there is such a path, as far as this user can see: only root may look into phosd's
    folder of images.
    """
    try:
        return path.exists()
    except PermissionError:
        return False


def _daemon(settings: Settings) -> list[Finding]:
    """Return whether phosd answers, and what it says is wrong, which only administrators see."""

    async def about(daemon: Daemon) -> Properties:
        return await daemon.properties(ROOT, MANAGER.name)

    try:
        found = _answer(settings, about)
    except NoBusError as error:
        return [Finding("daemon", "warning", str(error), error.hint)]
    except CallError as error:
        text, _, mend = str(of_bus(error, settings.bus)).partition("; ")
        mend = mend or "see what phosd says where it was started"
        return [Finding("daemon", "warning", text, mend)]
    running = _ok("daemon", f"phosd {found['Version']} on the {settings.bus} bus")
    return [running, *map(_trouble, found.get("Troubles", ()))]


def _trouble(told: str) -> Finding:
    """Return what phosd says is wrong; what to do stands behind the last semicolon."""
    text, _, mend = told.rpartition("; ")
    return Finding("daemon", "warning", text or mend, mend if text else "see phosd's log")

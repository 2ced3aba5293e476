"""Implement ``phos warm-cache``: analyse installed libraries ahead of time."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.client.text import human_bytes
from phosd.units import counted

if TYPE_CHECKING:
    from phosd.engine.kernels.analyser import Analyser
    from phosd.engine.kernels.entry import Entry

_NO_LIMIT = 1 << 62
"""phosd itself keeps the cache within its limit."""


@command()
@click.argument(
    "paths", metavar="[FILE|FOLDER]...", nargs=-1, type=click.Path(exists=True, path_type=Path)
)
@click.option(
    "--architecture",
    "architectures",
    type=click.IntRange(min=1),
    multiple=True,
    help="For which GPUs: 90 is sm_90 (default: those of this machine).",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="How many modules are analysed at a time (default: as many as half of the processors).",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, readable=False),
    default=Path("/var/lib/phos"),
    show_default=True,
    help="Where phosd keeps images, and what is known of kernels.",
)
def warm_cache(
    settings: Settings,
    paths: tuple[Path, ...],
    architectures: tuple[int, ...],
    jobs: int | None,
    state_dir: Path,
) -> None:
    """Analyse kernels before they are loaded. Programs that load the kernels in FILES, or in the
    libraries, cubins and PTX in FOLDERS, find it done. For root; phosd need not run.

    Without a FILE it takes the libraries of CUDA's toolkit, and those of the Python that phosd runs
    with. It may take hours, as libraries have tens of thousands of kernels. It runs when
    nothing else wants to, and can be interrupted: what was found stays, and it goes on from there.

    \b
    Examples:
      phos warm-cache /opt/venv/lib/python3.12/site-packages/torch/lib
      phos warm-cache --architecture 90 --jobs 32
    """
    from phosd.engine.kernels import warm

    if os.geteuid() != 0:
        raise CommandError(
            "NotAuthorized", "what phosd knows of kernels is root's: run this as root (sudo)"
        )
    found = warm.files(paths or warm.installed())
    wanted = architectures or _of_this_machine()
    analyser = _analyser(state_dir)
    threads = jobs or max(1, (os.cpu_count() or 2) // 2)
    rows = []
    with ThreadPoolExecutor(threads) as pool, _ended(analyser), _shown(settings) as show:
        for file in found:
            row = _of_file(analyser, file, wanted, pool, threads, show)
            if row["modules"]:
                rows.append(row)
                _tell(settings, row)
    if not settings.json:
        if not rows:
            names = ", ".join(f"sm_{each}" for each in wanted)
            settings.note(f"there are no kernels for {names} in {counted(len(found), 'file')}")
        settings.note(f"what is known of kernels takes {human_bytes(analyser.cache.size())}")


def _analyser(state_dir: Path) -> "Analyser":
    from phosd.engine.image.folder import StoreFolder
    from phosd.engine.kernels.analyser import Analyser
    from phosd.engine.kernels.cache import Cache

    if not (state_dir / "secret").exists():
        raise CommandError(
            "InvalidOption", f"{state_dir} is not phosd's folder; start phosd once, or name it"
        )
    return Analyser(Cache(state_dir, StoreFolder(state_dir).key.packed, _NO_LIMIT))


def _of_this_machine() -> tuple[int, ...]:
    from phosd.engine.node.gpus import architecture_of, list_gpus

    return tuple(sorted({architecture_of(gpu.ordinal) for gpu in list_gpus()}))


def _of_file(
    analyser: "Analyser",
    file: Path,
    architectures: tuple[int, ...],
    pool: ThreadPoolExecutor,
    threads: int,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Analyse the modules of a file, as many at a time as the pool has threads."""
    from phosd.engine.kernels import warm

    result = warm.Warmed()
    running: set[Future[tuple[Entry, bool]]] = set()
    kernels: dict[int, int] = {}
    lock = threading.Lock()

    def begin(number: int, data: bytes, architecture: int) -> None:
        def tell(count: int) -> None:
            with lock:
                kernels[number] = count
                total = sum(kernels.values())
            show(f"{file}: module {result.modules + 1}, {counted(total, 'kernel')} so far")

        running.add(pool.submit(warm.warm, analyser, data, architecture, tell))

    def take(most: int) -> None:
        while len(running) > most:
            done, _ = wait(running, return_when="FIRST_COMPLETED")
            running.difference_update(done)
            for each in done:
                entry, whole = each.result()
                if entry.state != "other-architecture":
                    result.add(entry, whole=whole)

    number = 0
    for data in warm.modules(file):
        for architecture in architectures:
            number += 1
            take(threads - 1)
            begin(number, data, architecture)
    take(0)
    return {
        "file": str(file),
        "modules": result.modules,
        "kernels": result.kernels,
        "roles": result.roles,
        "ranges": result.ranges,
        "failed": result.failed,
        "unfinished": result.early,
    }


def _tell(settings: Settings, row: dict[str, Any]) -> None:
    if settings.json:
        settings.emit(row)
        return
    text = f"{row['file']}: {row['kernels']} kernels in {row['modules']} modules"
    if row["kernels"]:
        roles, ranges = (f"{row[key] / row['kernels']:.0%}" for key in ("roles", "ranges"))
        text += f", roles known of {roles}, ranges of {ranges}"
    for key in ("failed", "unfinished"):
        if row[key]:
            text += f", {row[key]} {key}"
    settings.say(text)


@contextmanager
def _ended(analyser: "Analyser") -> Iterator[None]:
    """End what is going on when the user interrupts, so that what it has found is kept."""
    try:
        yield
    except BaseException:
        analyser.stop()
        raise


@contextmanager
def _shown(settings: Settings) -> Iterator[Callable[[str], None]]:
    """Show how far it is, on a terminal."""
    if settings.json or not settings.err.is_terminal:
        yield lambda text: None
        return
    with settings.err.status("") as status:
        yield lambda text: status.update(text)

"""Describe this machine in an image, and compare it at a restore."""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from phosd.engine.criu.run.program import Criu
from phosd.engine.image.manifest import Gpu, Host, HostGpu, Manifest
from phosd.engine.job.checks import Check, require_all
from phosd.engine.node.gpus import list_gpus
from phosd.engine.system.cuda import driver_version
from phosd.errors import DriverTooOld, Reason, Unsupported


def this_host(criu: Criu | None, runtime_dir: Path | None = None) -> Host:
    """Return what a restore must find again; without CRIU, what a resume must."""
    return Host(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        kernel=os.uname().release,
        criu=criu.version if criu else "",
        driver=driver_version(),
        cpu_flags=_cpu_flags(),
        gpus=tuple(HostGpu(gpu.uuid, gpu.name) for gpu in list_gpus()),
        runtime_dir=str(runtime_dir or ""),
    )


def describe_gpus(
    seen: Iterable[int], used: Iterable[int], needs: Mapping[int, int] = MappingProxyType({})
) -> tuple[Gpu, ...]:
    """Return the node's GPUs with these ordinals: those that a program sees, those of them that it
    uses, and the bytes that the driver will need there.
    """
    in_use = set(used)
    wanted = in_use | set(seen)
    return tuple(
        Gpu(
            gpu.ordinal,
            gpu.uuid,
            gpu.name,
            gpu.memory_total,
            used=gpu.ordinal in in_use,
            needs=needs.get(gpu.ordinal, 0),
        )
        for gpu in list_gpus()
        if gpu.ordinal in wanted
    )


def require_same_machine(manifest: Manifest, criu: Criu, runtime_dir: Path) -> None:
    """Raise unless driver, CRIU and CPU of this machine can load the image, and its hooks are found
    in ``runtime_dir``.
    """
    require_all(same_machine(manifest, criu, runtime_dir))


def same_machine(manifest: Manifest, criu: Criu, runtime_dir: Path) -> list[Check]:
    """Return the checks of :func:`require_same_machine`."""
    here = this_host(criu, runtime_dir)
    return [
        ("driver", partial(_require_driver, manifest, here)),
        ("CRIU", partial(_require_criu, manifest, here)),
        ("CPU", partial(_require_cpu, manifest, here)),
        ("runtime folder", partial(_require_runtime_dir, manifest, here)),
    ]


def _require_driver(manifest: Manifest, here: Host) -> None:
    host = manifest.host
    if here.driver < host.driver:
        raise DriverTooOld(
            f"image {manifest.id} was made with driver API {host.driver}, here is {here.driver}",
            hint="update the driver on this node, or restore elsewhere",
        )


def _require_criu(manifest: Manifest, here: Host) -> None:
    host = manifest.host
    if _version(here.criu) < _version(host.criu):
        raise Unsupported(
            f"image {manifest.id} was made with CRIU {host.criu}, here is {here.criu}",
            hint="install that CRIU or a newer one",
            reason=Reason.OTHER_CRIU,
        )


def _require_cpu(manifest: Manifest, here: Host) -> None:
    if missing := set(manifest.host.cpu_flags) - set(here.cpu_flags):
        raise Unsupported(
            f"image {manifest.id} needs CPU features that are not here: "
            + ", ".join(sorted(missing)[:8]),
            hint="restore on a machine with the same kind of CPU",
            reason=Reason.OTHER_CPU,
        )


def _require_runtime_dir(manifest: Manifest, here: Host) -> None:
    there = manifest.host.runtime_dir
    if not there or not any(process.hooked for process in manifest.processes):
        return
    if Path(there).resolve() != Path(here.runtime_dir).resolve():
        raise Unsupported(
            f"the hooks in image {manifest.id} are reached in {there}, and this phosd looks for"
            f" them in {here.runtime_dir}",
            hint=f"start phosd with --runtime-dir={there}, or restore with one that has it",
            reason=Reason.OTHER_RUNTIME_DIR,
        )


def _cpu_flags() -> tuple[str, ...]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return tuple(sorted(line.partition(":")[2].split()))
    return ()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())

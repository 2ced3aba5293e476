"""Implement ``phos setup-container-runtime``: make a runtime put the hook into containers.

Runtimes take a device of ours for what is mounted and set in a container that asks for it, by CDI
(Container Device Interface). Podman, CRI-O and containerd look for such descriptions by themselves,
Docker if it is told to. The CRIU that they save containers with is told of phosd's plugin by
settings that runc and crun pass on.
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from phosd.cli.command import command
from phosd.cli.run_command.environment import SAVABLE
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.engine.hook_client.places import IN_CONTAINERS
from phosd.engine.system.native import hook_library, runtime_plugins

DEVICE = "phos.io/hook=all"
DESCRIPTION = Path("/etc/cdi/phos.json")
DOCKER = Path("/etc/docker/daemon.json")
CONTAINERD = Path("/etc/containerd/config.toml")
CRIU = (Path("/etc/criu/runc.conf"), Path("/etc/criu/crun.conf"))
"""Settings of the CRIU of runc and crun, with which each of the runtimes saves a container."""
_CRUN_WITH_SETTINGS = (1, 26)
"""The first crun that tells CRIU of them."""
_HOOK = "/usr/lib/phos/libphos_hook.so"
_CRI = "io.containerd.grpc.v1.cri"
_CONTAINERD_WITH_CDI_IF_TOLD = (1, 7)
_CONTAINERD_WITH_CDI = (2,)


@dataclass(frozen=True)
class _Runtime:
    """``set_up`` and ``undo`` change its own settings; each returns what was changed, and what is
    left to do.
    """

    set_up: Callable[[], tuple[list[Path], str]]
    undo: Callable[[], tuple[list[Path], str]]
    start: str
    may_use_crun: bool = False
    asks: str = f"--device {DEVICE}"
    """How a container gets the device."""


@command(name="setup-container-runtime")
@click.argument("runtime", type=click.Choice(["podman", "docker", "containerd", "crio"]))
@click.option("--undo", is_flag=True, help="Take away what was set up for RUNTIME.")
def setup_container_runtime(settings: Settings, runtime: str, undo: bool) -> None:
    """Let containers ask for phosd's hook. RUNTIME then puts it into those that do, so that their
    programs can be suspended, resumed and moved from outside, and saved by RUNTIME's own commands.
    Needs root.

    A container asks by the device phos.io/hook=all, beside those of its GPUs. It then has the hook,
    the variables that `phos run` sets, and a folder in memory in which the hook listens. Pods of
    Kubernetes have the same by volumes. The CRIU of runc and crun gets phosd's plugin (/etc/criu),
    which does nothing for programs without a GPU.

    \b
    Examples:
      phos setup-container-runtime podman
      podman run --device nvidia.com/gpu=all --device phos.io/hook=all IMAGE python train.py
      phos setup-container-runtime docker --undo
    """
    if os.geteuid() != 0:
        raise CommandError(
            "NotAuthorized", f"only root may change the settings of {runtime}; run it with sudo"
        )
    known = _RUNTIMES[runtime]
    if undo:
        changed, left = known.undo()
        if not _others(runtime):
            changed += [*_remove(DESCRIPTION), *_undo_criu()]
    else:
        changed, left = known.set_up()
        _write(DESCRIPTION, json.dumps(description(hook_library()), indent=2) + "\n")
        settings_of_criu, for_criu = _set_up_criu()
        changed = [DESCRIPTION, *settings_of_criu, *changed]
        crun = _unfit_crun() if known.may_use_crun else ""
        left = "; ".join(filter(None, [left, for_criu, crun]))
    todo = [*filter(None, [left]), *([known.start] if known.start and changed else [])]
    if settings.json:
        settings.emit(
            {"runtime": runtime, "device": DEVICE, "changed": list(map(str, changed)), "todo": todo}
        )
        return
    done = "taken back" if undo else "written"
    settings.facts({done: ", ".join(map(str, changed)) or "nothing", "to do": "; ".join(todo)})
    if not undo:
        settings.facts({"containers ask": known.asks})


def description(hook: Path) -> dict[str, Any]:
    """Return the description of the device, for a hook that is in this file of the host."""
    variables = {"LD_PRELOAD": _HOOK, **SAVABLE}
    return {
        "cdiVersion": "0.5.0",
        "kind": DEVICE.partition("=")[0],
        "devices": [
            {
                "name": DEVICE.partition("=")[2],
                "containerEdits": {
                    "env": [f"{name}={value}" for name, value in variables.items()],
                    "mounts": [
                        {
                            "hostPath": str(hook.resolve()),
                            "containerPath": _HOOK,
                            "options": ["bind", "ro", "nosuid", "nodev"],
                        },
                        {
                            "hostPath": "tmpfs",
                            "containerPath": IN_CONTAINERS,
                            "type": "tmpfs",
                            "options": ["nosuid", "nodev", "noexec", "mode=1733", "size=1m"],
                        },
                    ],
                },
            }
        ],
    }


def _set_up_criu() -> tuple[list[Path], str]:
    """Make the CRIU of runtimes load phosd's plugin, and no other: two would act on one GPU."""
    changed, left = [], []
    line = _criu_line()
    for path in CRIU:
        if not path.exists():
            _write(path, line)
            changed.append(path)
        elif line not in path.read_text():
            left.append(f"put the line {line.strip()!r} into {path}, instead of another libdir")
    return changed, "; ".join(left)


def _undo_criu() -> list[Path]:
    ours = [path for path in CRIU if path.exists() and path.read_text() == _criu_line()]
    return [removed for path in ours for removed in _remove(path)]


def _criu_line() -> str:
    return f"libdir {runtime_plugins()}\n"


def _unfit_crun() -> str:
    """Return what to do if there is a crun whose CRIU does not get these settings; empty if not."""
    version, told = _version("crun")
    if not version or ("+CRIU" in told and version >= _CRUN_WITH_SETTINGS):
        return ""
    why = "hands no settings on to its CRIU" if "+CRIU" in told else "is built without CRIU"
    newer, this = (".".join(map(str, each)) for each in (_CRUN_WITH_SETTINGS, version))
    return (
        f"have containers that are to be saved use runc (podman --runtime runc), or crun {newer} or"
        f" newer: {shutil.which('crun')} {this} {why}"
    )


def _version(program: str) -> tuple[tuple[int, ...], str]:
    """Return the version of a program, and all that it says of it; empty if there is none."""
    if shutil.which(program) is None:
        return (), ""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\b\d+(\.\d+)+", told.stdout)
    return tuple(map(int, found[0].split("."))) if found else (), told.stdout


# What each runtime needs besides the description.


def _nothing() -> tuple[list[Path], str]:
    return [], ""


def _set_up_docker() -> tuple[list[Path], str]:
    found = _docker_settings()
    if found.setdefault("features", {}).get("cdi") is True:
        return [], ""
    found["features"]["cdi"] = True
    _write(DOCKER, json.dumps(found, indent=2) + "\n")
    return [DOCKER], ""


def _undo_docker() -> tuple[list[Path], str]:
    found = _docker_settings()
    if found.get("features", {}).pop("cdi", None) is None:
        return [], ""
    if not found["features"]:
        del found["features"]
    _write(DOCKER, json.dumps(found, indent=2) + "\n")
    return [DOCKER], ""


def _docker_settings() -> dict[str, Any]:
    try:
        found = json.loads(DOCKER.read_text() or "{}")
        if not isinstance(found, dict) or not isinstance(found.get("features", {}), dict):
            raise ValueError("no object")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CommandError(
            "Unsupported", f"{DOCKER} is not as Docker reads it ({error}); mend it, and try again"
        ) from error
    return found


def _set_up_containerd() -> tuple[list[Path], str]:
    """Change nothing. containerd 2 looks for devices by itself. What an earlier one imports takes
    the place of all that the node has in the same section, as NVIDIA's runtime.
    """
    version, _ = _version("containerd")
    if not version or version >= _CONTAINERD_WITH_CDI:
        return [], ""
    if version < _CONTAINERD_WITH_CDI_IF_TOLD:
        known = ".".join(map(str, _CONTAINERD_WITH_CDI_IF_TOLD))
        return [], f"have containers get the hook by volumes, or use containerd {known} or newer"
    if _enables_cdi():
        return [], ""
    return [], (
        f'put enable_cdi = true and cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"] below'
        f' [plugins."{_CRI}"] in {CONTAINERD}; systemctl restart containerd'
    )


def _enables_cdi() -> bool:
    """Return whether the settings of containerd 1.7 tell it to look for devices."""
    try:
        found = tomllib.loads(CONTAINERD.read_text())
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise CommandError(
            "Unsupported",
            f"{CONTAINERD} is not as containerd reads it ({error}); mend it, and try again",
        ) from error
    return bool(found.get("plugins", {}).get(_CRI, {}).get("enable_cdi"))


_BY_CDI = f"for the CDI device {DEVICE}; pods have volumes instead"
_RUNTIMES = {
    "podman": _Runtime(_nothing, _nothing, "", may_use_crun=True),
    "crio": _Runtime(_nothing, _nothing, "systemctl restart crio", True, _BY_CDI),
    "docker": _Runtime(_set_up_docker, _undo_docker, "systemctl restart docker"),
    "containerd": _Runtime(_set_up_containerd, _nothing, "", asks=_BY_CDI),
}


def _others(runtime: str) -> bool:
    """Return whether another runtime was set up that needs the description."""
    return runtime != "docker" and _docker_settings().get("features", {}).get("cdi") is True


def _write(path: Path, text: str) -> None:
    """Put a file there whole, or not at all."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text)
    draft.chmod(mode)
    draft.rename(path)


def _remove(path: Path) -> list[Path]:
    if not path.exists():
        return []
    path.unlink()
    return [path]

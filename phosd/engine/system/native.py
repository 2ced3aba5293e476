"""Find phosd's native libraries, and this package for processes that phosd starts."""

import os
from pathlib import Path

from phosd.errors import Internal


def is_reachable(path: Path) -> bool:
    """Return whether a file is there for this user, who may not enter a checkout below a home."""
    try:
        return path.is_file()
    except PermissionError:
        return False


def _find(name: str) -> Path:
    override = os.environ.get("PHOS_NATIVE_DIR")
    folders = [Path(override)] if override else []
    folders += [Path(__file__).parents[2] / "native", Path("/usr/lib/phos")]
    for folder in folders:
        if is_reachable(folder / name):
            return folder / name
    places = ", ".join(map(str, folders))
    raise Internal(
        f"the native library {name} is not built, or uid {os.geteuid()} may not reach it (looked "
        f"in {places})",
        hint="run `make build`, or install the package",
    )


def hook_library() -> Path:
    """Return the library that ``phos run`` preloads into a program."""
    return _find("libphos_hook.so")


def term_library() -> Path:
    """Return the library that ``phos run --on-term=save`` preloads into a program."""
    return _find("libphos_term.so")


def softgpu_folder() -> Path:
    """Return the folder for ``LD_LIBRARY_PATH`` in which ``libcuda.so.1`` is the software GPU."""
    return _find("softgpu/libcuda.so.1").parent


def digest_library() -> Path:
    """Return the library that computes chunk digests on the CPU."""
    return _find("libphos_digest.so")


def board_library() -> Path:
    """Return the library that accesses the chunk maps shared by hooks and movers."""
    return _find("libphos_board.so")


def pages_library() -> Path:
    """Return the library that ``criu dump`` loads to copy pages with many threads."""
    return _find("libphos_pages.so")


def runtime_plugins() -> Path:
    """Return the folder of the plugin for the CRIU of containers' runtimes."""
    return _find("runtime_plugin/phos_plugin.so").parent


def slurm_plugin() -> Path:
    """Return the library that Slurm's commands and daemons load (docs/operate/slurm.md)."""
    return _find("phos_slurm.so")


def criu_plugins() -> Path:
    """Return the folder of what ``criu dump`` loads as plugins."""
    return _find("criu_plugin/libphos_criu.so").parent


def python_environment() -> dict[str, str]:
    """Return an environment in which another Python finds this package and its dependencies."""
    folders = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}

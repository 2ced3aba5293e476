"""Where our own parts are: the native libraries, and this package for processes that we start."""

import contextlib
import os
from pathlib import Path

from phosd.errors import Internal


def _find(name: str) -> Path:
    override = os.environ.get("PHOS_NATIVE_DIR")
    folders = [Path(override)] if override else []
    folders += [Path(__file__).parents[2] / "native", Path("/usr/lib/phos")]
    for folder in folders:
        with contextlib.suppress(PermissionError):  # a checkout below somebody's home
            if (folder / name).exists():
                return folder / name
    places = ", ".join(map(str, folders))
    raise Internal(
        f"the native library {name} is not built, or uid {os.geteuid()} may not reach it (looked "
        f"in {places})",
        hint="run `make build`, or install the package",
    )


def hook_library() -> Path:
    """The library that ``phos run`` preloads into a program."""
    return _find("libphos_hook.so")


def softgpu_folder() -> Path:
    """The folder to put on ``LD_LIBRARY_PATH`` so that ``libcuda.so.1`` is the software GPU."""
    return _find("softgpu/libcuda.so.1").parent


def digest_library() -> Path:
    """The chunk digest for the CPU."""
    return _find("libphos_digest.so")


def board_library() -> Path:
    """What works on the memory that hooks and movers share."""
    return _find("libphos_board.so")


def pages_library() -> Path:
    """What ``criu dump`` loads to copy pages with many threads."""
    return _find("libphos_pages.so")


def python_environment() -> dict[str, str]:
    """An environment in which another Python finds this very package and what it depends on."""
    folders = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}

"""Implement ``phos demo``: checkpoint, kill and restore a training run."""

import importlib.util
import runpy
import sys

from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.errors import Reason, Unsupported

_NEEDED = {"numpy": "numpy", "sklearn": "scikit-learn"}
"""Modules that only the demo imports, and the packages that provide them."""


@command()
def demo(settings: Settings) -> None:
    """Save, kill and restore a small training. What it computes after the restore is compared with
    what it computes undisturbed.

    Needs root, and packages that an installed phosd has not: `make demo` in a checkout of phosd
    installs them and runs it. Runs on the GPU if there is one,
    otherwise on the software GPU. The last line is one JSON object.
    """
    missing = [name for module, name in _NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        raise Unsupported(
            f"the demo needs Python packages that are not installed: {', '.join(missing)}",
            hint="`make demo` in a checkout of phosd installs them and runs it",
            reason=Reason.MISSING_PACKAGE,
        )
    sys.argv = ["phos demo"]
    runpy.run_module("phosd.demo", run_name="__main__")

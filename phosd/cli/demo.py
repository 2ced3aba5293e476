"""``phos demo``: the whole thing, shown."""

import runpy
import sys

from phosd.cli.settings import Settings, command


@command()
def demo(settings: Settings) -> None:
    """Train a small network, save it, kill it, restore it, and compare what it computes.

    Needs the packages of `pip install 'phosd[demo]'` and root. Runs on the GPU if there is one,
    otherwise on the software GPU. The last line is one JSON object.
    """
    sys.argv = ["phos demo"]
    runpy.run_module("phosd.demo", run_name="__main__")

"""Run an operation in an engine that is killed at a step of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys, pathlib
from phosd.engine.operations.{module} import *
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
place = pathlib.Path(sys.argv[1])
node = Node(NodeConfig(place / "state", place / "run"))
{module}(node, int(sys.argv[2]), {options}, Progress())
"""


def killed_at(point: str, module: str, options: str, place: Path, pid: int) -> None:
    """Let an engine of its own ``suspend`` or ``resume`` (``module``) the program of ``pid``, with
    ``options`` as Python writes them, until it comes to a fault point.
    """
    fault = os.environ | {"PHOS_FAULT": f"{point}:1:kill"}
    program = _PROGRAM.format(module=module, options=options)
    words = [sys.executable, "-c", program, str(place), str(pid)]
    log = place / "engine.log"
    with log.open("ab") as said:  # not a pipe, which its movers would keep open
        done = subprocess.run(words, env=fault, stderr=said, timeout=60)
    assert done.returncode == -signal.SIGKILL, log.read_text()

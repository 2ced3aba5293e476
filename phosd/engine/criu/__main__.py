"""Probe the CRIU that would be used: ``python -m phosd.engine.criu``."""

import sys

from phosd.engine.criu.probe import require_working
from phosd.engine.criu.run.program import Criu
from phosd.errors import PhosError

if __name__ == "__main__":
    try:
        criu = require_working(Criu.find())
    except PhosError as error:
        sys.exit(str(error))
    print(f"CRIU {criu.version} works ({criu.path})")

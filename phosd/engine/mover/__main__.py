"""Run the process of one data mover: ``python -m phosd.engine.mover``."""

import sys

from phosd.engine.mover.worker.main import main

sys.exit(main())

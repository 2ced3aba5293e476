"""Run the process of one data mover: ``python -m phosd.engine.mover``."""

import os

from phosd.engine.mover.worker.main import main

# At once: whoever waits for the end wants the GPU's memory, and the kernel frees it faster than
# the driver's library and the interpreter do, piece by piece.
os._exit(main())

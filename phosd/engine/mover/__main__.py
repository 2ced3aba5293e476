"""``python -m phosd.engine.mover``: the process of one data mover."""

import sys

from phosd.engine.mover.worker.main import main

sys.exit(main())

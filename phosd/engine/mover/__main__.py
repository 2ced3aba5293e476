"""``python -m phosd.engine.mover``: started by :meth:`phosd.engine.mover.Mover.start`."""

import sys

from phosd.engine.mover.server import main

sys.exit(main())

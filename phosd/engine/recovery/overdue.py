"""Log what recovery is waiting for; phosd serves nobody until it is done."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

WARNING_SECONDS = 5.0
"""Seconds after which a step is worth a word. Most take milliseconds."""
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def overdue(step: str) -> Iterator[None]:
    """Log ``step`` (as in "waiting for CRIU") once it takes longer than :data:`WARNING_SECONDS`,
    and then how long it took.
    """
    began = time.monotonic()
    late = threading.Timer(WARNING_SECONDS, lambda: _log.warning("recovery: still %s", step))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        if (took := time.monotonic() - began) > WARNING_SECONDS:
            _log.warning("recovery: %.1f s of %s", took, step)

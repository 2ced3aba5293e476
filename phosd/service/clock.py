"""The time by which things grow old."""

import time

_BEGAN = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def age_clock() -> float:
    """Seconds since the epoch, as far as they have passed: a clock that is set ahead by years while
    phosd runs makes nothing old enough to be deleted.
    """
    return min(time.time(), _BEGAN + time.clock_gettime(time.CLOCK_BOOTTIME))

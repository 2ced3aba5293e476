"""Tell the time that ages of images and jobs are measured by."""

import time

_BEGAN = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def age_clock() -> float:
    """Return seconds since the epoch, advancing no faster than the boot clock. Setting the system
    clock years ahead while phosd runs therefore makes nothing old enough to be deleted.
    """
    return min(time.time(), _BEGAN + time.clock_gettime(time.CLOCK_BOOTTIME))

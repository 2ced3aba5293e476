"""The measured behaviours of NVIDIA's driver that phosd relies on, and a probe of each.

``behaviours`` is the table; ``test_<section>.py`` has the probes of the rows of a section. A probe
asks the driver alone: there is no hook in its processes, and no phosd beside them. ``make test``
asks the software GPU, which is so held to the same table, and ``make test-gpu`` the real driver.
``subjects`` starts the processes of a probe, and ``inside`` is what runs in them.
"""

MESSAGE = 1 << 16
"""Most bytes of a message to a process of a probe, or from it."""

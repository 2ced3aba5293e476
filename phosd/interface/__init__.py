"""What phosd offers on D-Bus, as data: objects, methods, options, signals and their documentation.

The service, the clients, ``phos``, ``phos-tui`` and the reference pages take it from here, or are
held against it. Nothing here imports anything of phosd.
"""

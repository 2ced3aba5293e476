"""The daemon: jobs, history, journal and the D-Bus objects over the engine."""

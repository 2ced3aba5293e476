"""Keep what the analysis says of kernels, and start analyses.

``cache`` keeps an entry for each module, by a digest of its bytes. ``analyser`` makes it in a
process that can do little (``worker``). ``fetch`` has the bytes of a module that a process has
loaded read as the process's owner (``reader``).
"""

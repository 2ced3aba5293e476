"""Hold the commands of ``phos``, one in a module of its name, and what they alone need."""

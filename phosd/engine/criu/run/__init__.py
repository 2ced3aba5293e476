"""Run CRIU: its command line, its processes, its tracers, and what ends it when it hangs."""

"""phos-tui: every GPU process of the node on a terminal. A D-Bus client of phosd, nothing else."""

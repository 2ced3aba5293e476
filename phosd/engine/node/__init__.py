"""This node: its GPUs, its movers, its folders, and which processes have a job."""

"""Processes, their trees, the groups that are saved as one, and the driver's checkpoint."""

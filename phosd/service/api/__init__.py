"""The objects on the bus: what they do, tell and announce."""

"""Export, copy, park and watch the device memory of programs."""

"""Queue and run jobs; define their limits and options and the engine interface that they call."""

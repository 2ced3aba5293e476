"""Jobs, their limits and options, and the engine that they call."""

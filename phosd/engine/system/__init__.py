"""Access Linux, CUDA and the native libraries for the engine."""

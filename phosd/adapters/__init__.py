"""Safe points for training libraries. Each module needs the library of its name."""

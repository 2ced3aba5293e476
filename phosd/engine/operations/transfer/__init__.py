"""Export an image to another machine, and import one, over a stream of the caller."""

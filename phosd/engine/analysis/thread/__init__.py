"""Follow a thread of a kernel, one instruction after the other, to the accesses that it makes."""

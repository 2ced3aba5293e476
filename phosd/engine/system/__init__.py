"""Linux, CUDA and the built libraries, as far as the engine needs them."""

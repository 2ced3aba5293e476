// Reads much, and writes little: what each thread finds at its place in four blocks.
extern "C" __global__ void gather(const unsigned* a, const unsigned* b, const unsigned* c,
                                  const unsigned* d, unsigned* out, unsigned count) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = out[i] * 5u + (a[i] ^ b[i]) + (c[i] ^ d[i]) + i;
}

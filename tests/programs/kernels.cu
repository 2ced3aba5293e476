// The kernels of the target programs. Integer and IEEE arithmetic only, and sums whose order does
// not matter, so that every device gives the same bits.

typedef unsigned long long u64;

__device__ unsigned calls;  // how often `advance` ran: module state that must survive, too
__device__ u64 salt[4] = {0x9E3779B97F4A7C15ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull, 1};
__constant__ unsigned odd = 0x85EBCA6Bu;

__device__ __forceinline__ unsigned rotate(unsigned value, unsigned bits) {
    return (value << bits) | (value >> (32 - bits));
}

// Every quad becomes a function of itself, its place and the seed; one word of it is computed in
// single precision, which stays within [0, 2) and is rounded at every step.
extern "C" __global__ void advance(uint4* quads, unsigned count, u64 seed) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += gridDim.x * blockDim.x) {
        uint4 q = quads[i];
        q.x = (q.x ^ (unsigned)seed) * odd + i;
        q.y = rotate(q.y + q.x, 13) ^ (unsigned)(seed >> 32);
        q.z += q.y * 5u;
        const float previous = __uint_as_float(0x3F800000u | (q.w & 0x7FFFFFu)) - 1.0f;
        const float next = fmaf(previous, 0.75f, (float)(q.z >> 8) * 0x1p-26f);
        q.w = __float_as_uint(sqrtf(next) / (1.0f + next));
        quads[i] = q;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(&calls, 1u);  // streams run side by side
}

// Adds a value that depends on every bit of the quads, and on their places, to *sum. Blocks of 128.
extern "C" __global__ void fold(const uint4* quads, unsigned count, u64* sum) {
    __shared__ u64 partial[128];
    u64 mine = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += gridDim.x * blockDim.x) {
        const uint4 q = quads[i];
        const u64 low = ((u64)q.y << 32) | q.x, high = ((u64)q.w << 32) | q.z;
        mine += ((low ^ salt[0]) * (2ull * i + 1)) ^ ((high + salt[1]) * salt[2]);
    }
    partial[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned half = 64; half > 0; half >>= 1) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(sum, partial[0]);
}

// Makes the sum depend on the sums before it, and on the module's own variables.
extern "C" __global__ void stir(u64* sum) {
    *sum = (*sum ^ (*sum >> 29)) * 0xBF58476D1CE4E5B9ull + calls + salt[3];
    salt[3] += *sum | 1;
}

// Waits until *flag reaches `value`, then adds the flag to the sum: work that another stream, or
// the host, lets go on.
extern "C" __global__ void wait_for(volatile unsigned* flag, unsigned value, u64* sum) {
    while (*flag < value) {
    }
    *sum += *flag;
}

extern "C" __global__ void raise(volatile unsigned* flag, unsigned value) {
    *flag = value;
}

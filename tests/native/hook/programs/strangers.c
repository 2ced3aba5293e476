// Driver functions of a later driver, with every kind of argument that the ABI knows.

struct Small {  // travels in two registers
    double real;
    long whole;
};
struct Large {  // travels on the stack
    long values[4];
};

// Ten integers: six in registers, four on the stack.
int cuLaunchTenIntegers(long a, long b, long c, long d, long e, long f, long g, long h, long i,
                        long j, long* out) {
    *out = a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j;
    return 0;
}

// Ten floating-point numbers: eight in registers, two on the stack.
int cuMemcpyTenDoublesAsync(double a, double b, double c, double d, double e, double f, double g,
                            double h, double i, double j, double* out) {
    *out = a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j;
    return 0;
}

int cuMemsetMixedAsync(int a, float b, struct Small c, struct Large d, float e, char f,
                       double* out) {
    *out = a + 2 * b + 3 * c.real + 4 * c.whole + 5 * d.values[0] + 6 * d.values[3] + 7 * e + 8 * f;
    return 0;
}

// Returns what no CUresult is: the result must come through whole.
long cuStreamBatchMemOpLater(long x) {
    return x * 0x100000001;
}

// No name of work: the hook leaves it alone.
int cuDeviceGetColour(int device) {
    return device + 40;
}

// The kernels of a small network: 8x8 pictures of digits, one hidden layer, ten classes.
// Every sum has a fixed order, so that the same state gives the same bits.

constexpr int kTile = 16;

// c[m x n] = a[m x k] * b[k x n]. Element (i, j) of `a` is a[i * a_row + j * a_column], and so for
// `b`: that also multiplies by a transposed matrix. Blocks of kTile x kTile threads, one a tile.
extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k,
                                  int a_row, int a_column, int b_row, int b_column) {
    __shared__ float tile_a[kTile][kTile], tile_b[kTile][kTile];
    const int row = blockIdx.y * kTile + threadIdx.y;
    const int column = blockIdx.x * kTile + threadIdx.x;
    float sum = 0;
    for (int start = 0; start < k; start += kTile) {
        const int j = start + threadIdx.x, i = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < m && j < k ? a[row * a_row + j * a_column] : 0;
        tile_b[threadIdx.y][threadIdx.x] =
            column < n && i < k ? b[i * b_row + column * b_column] : 0;
        __syncthreads();
#pragma unroll
        for (int t = 0; t < kTile; ++t) sum += tile_a[threadIdx.y][t] * tile_b[t][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

// The pictures and labels of one batch.
extern "C" __global__ void gather(const float* pictures, const int* labels, const int* order,
                                  float* batch, int* batch_labels, int rows, int columns) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * columns) return;
    const int picture = order[i / columns];
    batch[i] = pictures[picture * columns + i % columns];
    if (i % columns == 0) batch_labels[i / columns] = labels[picture];
}

// Adds the bias of its column to every element and cuts it at `least`.
extern "C" __global__ void bias_and_cut(float* values, const float* bias, float least, int rows,
                                        int columns) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * columns) values[i] = fmaxf(values[i] + bias[i % columns], least);
}

// Softmax and cross-entropy of each row, and the gradient of their mean. One thread a row.
extern "C" __global__ void softmax_loss(const float* scores, const int* labels, float* gradient,
                                        float* losses, int rows, int columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* mine = scores + row * columns;
    float most = mine[0];
    for (int j = 1; j < columns; ++j) most = fmaxf(most, mine[j]);
    float sum = 0;
    for (int j = 0; j < columns; ++j) sum += __expf(mine[j] - most);
    for (int j = 0; j < columns; ++j) {
        const float share = __expf(mine[j] - most) / sum;
        gradient[row * columns + j] = (share - (j == labels[row] ? 1.0f : 0.0f)) / rows;
    }
    losses[row] = __logf(sum) + most - mine[labels[row]];
}

// Where the forward pass cut at zero, nothing flows back.
extern "C" __global__ void cut_backward(float* gradient, const float* activation, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && activation[i] <= 0) gradient[i] = 0;
}

// The sum of each column, one thread a column: the gradient of a bias, and the loss of a batch.
extern "C" __global__ void column_sum(const float* values, float* sums, int rows, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0;
    for (int i = 0; i < rows; ++i) sum += values[i * columns + column];
    sums[column] = sum;
}

// Stochastic gradient descent with momentum.
extern "C" __global__ void update(float* weights, float* momentum, const float* gradient,
                                  float rate, float friction, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    momentum[i] = friction * momentum[i] + gradient[i];
    weights[i] -= rate * momentum[i];
}

"""Train a small network on scikit-learn's digits with CUDA kernels of its own.

An ordinary CUDA program: it knows nothing of checkpoints. It prints ``<step> <loss>`` for every
step, the loss with all its digits, until it is killed or, with an argument, for that many steps.
"""

import itertools
import sys
from collections.abc import Iterator
from ctypes import c_float, c_int, c_uint64
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray
from sklearn.datasets import load_digits

BATCH = 64
HIDDEN = 64
RATE = 0.1
FRICTION = 0.9
TILE = 16
BLOCK = 128


def ok(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA call, or an error that names what the call answered."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA answered {error!r}")
    return values[0] if len(values) == 1 else values


class Gpu:
    """The first GPU, with the kernels of ``train.cu``."""

    def __init__(self) -> None:
        ok(driver.cuInit(0))
        self._context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
        ok(driver.cuCtxSetCurrent(self._context))
        self._module = ok(driver.cuModuleLoadData(self._compile()))
        self._kernels: dict[str, Any] = {}

    def _compile(self) -> bytes:
        source = Path(__file__).with_name("train.cu").read_bytes()
        program = ok(nvrtc.nvrtcCreateProgram(source, b"train.cu", 0, [], []))
        options = [b"--gpu-architecture=compute_75"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            log = b" " * int(ok(nvrtc.nvrtcGetProgramLogSize(program)))
            ok(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"train.cu does not compile: {log.decode()}")
        ptx = b" " * int(ok(nvrtc.nvrtcGetPTXSize(program)))
        ok(nvrtc.nvrtcGetPTX(program, ptx))
        return ptx

    def run(self, name: str, grid: tuple[int, int], block: tuple[int, int], *args: Any) -> None:
        """Start a kernel. Addresses are ``c_uint64``; plain ints and floats are 32 bits wide."""
        if name not in self._kernels:
            self._kernels[name] = ok(driver.cuModuleGetFunction(self._module, name.encode()))
        values = tuple(a.value if isinstance(a, c_uint64) else a for a in args)
        types = tuple(
            c_uint64 if isinstance(a, c_uint64) else c_float if isinstance(a, float) else c_int
            for a in args
        )
        kernel = self._kernels[name]
        ok(driver.cuLaunchKernel(kernel, *grid, 1, *block, 1, 0, 0, (values, types), 0))

    def each(self, name: str, count: int, *args: Any) -> None:
        """Start a kernel with one thread for each of ``count`` elements."""
        self.run(name, (-(-count // BLOCK), 1), (BLOCK, 1), *args)


class Tensor:
    """A matrix in device memory, 32-bit elements, rows one after the other."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.size = rows * columns
        self.address = c_uint64(int(ok(driver.cuMemAlloc(4 * self.size))))
        ok(driver.cuMemsetD32(self.address.value, 0, self.size))

    @classmethod
    def of(cls, values: NDArray[Any]) -> "Tensor":
        """A device copy of a 2-D array of 32-bit elements."""
        tensor = cls(*values.shape)
        tensor.set(values)
        return tensor

    def set(self, values: NDArray[Any]) -> None:
        """Replace all elements."""
        values = np.ascontiguousarray(values)
        ok(driver.cuMemcpyHtoD(self.address.value, values.ctypes.data, values.nbytes))

    def get(self) -> NDArray[np.float32]:
        """A host copy, once everything before is done."""
        values = np.empty((self.rows, self.columns), np.float32)
        ok(driver.cuMemcpyDtoH(values.ctypes.data, self.address.value, values.nbytes))
        return values


class Layer:
    """``inputs @ weights + bias``, with what its training needs."""

    def __init__(self, gpu: Gpu, inputs: int, outputs: int, random: np.random.Generator) -> None:
        self._gpu = gpu
        start = random.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)
        self.weights, self.bias = Tensor.of(start), Tensor(1, outputs)
        self.gradients = Tensor(inputs, outputs), Tensor(1, outputs)
        self._momenta = Tensor(inputs, outputs), Tensor(1, outputs)
        self.outputs = Tensor(BATCH, outputs)
        self.output_gradient = Tensor(BATCH, outputs)

    def forward(self, inputs: Tensor, least: float) -> None:
        """Compute ``outputs``, cut below at ``least``."""
        out = self.outputs
        self._multiply(inputs, self.weights, out)
        shape = out.rows, out.columns
        self._gpu.each("bias_and_cut", out.size, out.address, self.bias.address, least, *shape)

    def backward(self, inputs: Tensor, input_gradient: Tensor | None = None) -> None:
        """From ``output_gradient``: the gradients, and the input's where it is asked for."""
        upstream = self.output_gradient
        if input_gradient is not None:
            self._multiply(upstream, self.weights, input_gradient, transpose_b=True)
        weights, bias = self.gradients
        self._multiply(inputs, upstream, weights, transpose_a=True)
        shape = upstream.rows, upstream.columns
        self._gpu.each("column_sum", bias.size, upstream.address, bias.address, *shape)

    def update(self) -> None:
        """One step of gradient descent."""
        parameters = self.weights, self.bias
        for values, momentum, gradient in zip(
            parameters, self._momenta, self.gradients, strict=True
        ):
            addresses = values.address, momentum.address, gradient.address
            self._gpu.each("update", values.size, *addresses, RATE, FRICTION, values.size)

    def _multiply(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        inner = a.rows if transpose_a else a.columns
        a_strides = (1, a.columns) if transpose_a else (a.columns, 1)
        b_strides = (1, b.columns) if transpose_b else (b.columns, 1)
        grid = -(-c.columns // TILE), -(-c.rows // TILE)
        addresses = a.address, b.address, c.address
        shape = c.rows, c.columns, inner
        self._gpu.run("matmul", grid, (TILE, TILE), *addresses, *shape, *a_strides, *b_strides)


class Training:
    """The network and its data, all of it in device memory."""

    def __init__(self, seed: int = 1) -> None:
        self._gpu = Gpu()
        pictures, labels = load_digits(return_X_y=True)
        self._random = np.random.default_rng(seed)
        self._pictures = Tensor.of((pictures / 16).astype(np.float32))
        self._labels = Tensor.of(labels.astype(np.int32).reshape(-1, 1))
        self._order = Tensor(1, BATCH)
        self._batch = Tensor(BATCH, self._pictures.columns)
        self._batch_labels = Tensor(BATCH, 1)
        self._losses, self._loss = Tensor(BATCH, 1), Tensor(1, 1)
        self.hidden = Layer(self._gpu, self._pictures.columns, HIDDEN, self._random)
        self.output = Layer(self._gpu, HIDDEN, 10, self._random)
        self._batches = self._shuffled_batches()

    def _shuffled_batches(self) -> Iterator[NDArray[np.int32]]:
        """Row numbers of one batch after the other, shuffled anew in every epoch."""
        while True:
            order = self._random.permutation(self._pictures.rows).astype(np.int32)
            for start in range(0, len(order) - BATCH + 1, BATCH):
                yield order[start : start + BATCH].reshape(1, -1)

    def step(self) -> float:
        """Train on one batch; its mean loss before the update."""
        self._order.set(next(self._batches))
        self._gpu.each(
            "gather",
            self._batch.size,
            *(t.address for t in (self._pictures, self._labels, self._order)),
            *(t.address for t in (self._batch, self._batch_labels)),
            BATCH,
            self._batch.columns,
        )
        hidden, output = self.hidden, self.output
        hidden.forward(self._batch, least=0.0)
        output.forward(hidden.outputs, least=-np.inf)
        self._gpu.each(
            "softmax_loss",
            BATCH,
            *(t.address for t in (output.outputs, self._batch_labels)),
            *(t.address for t in (output.output_gradient, self._losses)),
            BATCH,
            output.outputs.columns,
        )
        output.backward(hidden.outputs, hidden.output_gradient)
        gradient = hidden.output_gradient
        self._gpu.each(
            "cut_backward", gradient.size, gradient.address, hidden.outputs.address, gradient.size
        )
        hidden.backward(self._batch)
        self._gpu.each("column_sum", 1, self._losses.address, self._loss.address, BATCH, 1)
        for layer in (hidden, output):
            layer.update()
        return float(self._loss.get()[0, 0]) / BATCH


def main() -> None:
    steps = range(int(sys.argv[1])) if len(sys.argv) > 1 else itertools.count()
    training = Training()
    for step in steps:
        print(step, repr(training.step()), flush=True)


if __name__ == "__main__":
    main()

"""The programs of the matrix (:mod:`bench.matrix`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """A program of ``bench/programs`` with its ``words`` and ``environment``.

    ``compare``: how many lines it prints between one step of the trial and the next. ``packages``
    are those whose versions matter. ``remedy`` says what to do if it is refused.
    """

    title: str
    program: str
    words: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("torch",)
    environment: Mapping[str, str] = field(default_factory=dict)
    compare: int = 20
    remedy: str = ""


def _data_loader(start: str, *more: str) -> Entry:
    shown = " ".join((start, *(each.lstrip("-") for each in more)))
    return Entry(
        f"ResNet-50, DataLoader with 4 workers ({shown}), pinned memory",
        "data_loader",
        ("--start", start, *more),
        ("torch", "timm"),
    )


def _compiled(mode: str) -> Entry:
    return Entry(f"torch.compile, mode {mode}", "compiled", ("--mode", mode))


def _native(way: str, title: str) -> Entry:
    return Entry(f"CUDA C++: {title}", "native.cu", (way,), (), compare=100)


ENTRIES: dict[str, Entry] = {
    "loader-fork": _data_loader("fork"),
    "loader-forkserver": _data_loader("forkserver"),
    "loader-spawn": _data_loader("spawn"),
    "loader-persistent": _data_loader("fork", "--persistent"),
    "compile": _compiled("default"),
    "compile-graphs": _compiled("reduce-overhead"),
    "compile-autotune": _compiled("max-autotune"),
    "amp": Entry("float16 with GradScaler, 8 GB resident", "trained", ("amp", "--resident", "8")),
    "expandable": Entry(
        "expandable segments, 8 GB resident", "trained", ("expandable", "--resident", "8")
    ),
    "malloc-async": Entry(
        "cudaMallocAsync, 8 GB resident", "trained", ("async", "--resident", "8")
    ),
    "trainer": Entry(
        "HF Trainer, 2 workers",
        "finetuned",
        ("trainer", "--size", "large"),
        ("torch", "transformers", "accelerate"),
    ),
    "accelerate": Entry(
        "Accelerate, 2 persistent workers",
        "finetuned",
        ("accelerate", "--size", "large"),
        ("torch", "accelerate"),
    ),
    "peft": Entry("PEFT, LoRA", "finetuned", ("peft",), ("torch", "peft")),
    "lightning": Entry(
        "Lightning, 2 workers",
        "lightened",
        (),
        ("torch", "lightning"),
        remedy="what Lightning imports had opened the GPU by OpenCL, too (libnvidia-opencl was "
        "loaded), of which the driver saves nothing: start it where no OpenCL is found",
    ),
    "geometric": Entry("graph network", "graph_network", (), ("torch", "torch-geometric")),
    "gpt2": Entry(
        "GPT-2 small, deterministic",
        "gpt2",
        ("--size", "small", "--deterministic", "--fill", "6"),
        ("torch", "transformers"),
        compare=10,
    ),
    "generate": Entry(
        "GPT-2 XL generates text",
        "generate",
        ("--size", "xl"),
        ("torch", "transformers"),
        compare=4,
    ),
    "captured": Entry("a training step in a CUDA graph", "captured"),
    "jax": Entry("JAX, flax and optax", "jax_train", ("--share", "0.06"), ("jax", "flax")),
    "jax-grown": Entry(
        "JAX without preallocation",
        "jax_train",
        (),
        ("jax", "flax"),
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "triton": Entry(
        "Triton kernel, 8 GB resident", "triton_rows", ("--resident", "8"), ("triton",)
    ),
    "cupy": Entry(
        "CuPy, four streams, 8 GB resident",
        "arrays",
        ("streams", "--resident", "8"),
        ("cupy-cuda13x",),
    ),
    "cupy-async": Entry("CuPy, the driver's pool", "arrays", ("async",), ("cupy-cuda13x",)),
    "cupy-fft": Entry("CuPy, cuFFT", "arrays", ("fft",), ("cupy-cuda13x",)),
    "cupy-solver": Entry("CuPy, cuSOLVER and cuBLAS", "arrays", ("solver",), ("cupy-cuda13x",)),
    "numba": Entry("numba-cuda", "jitted", ("numba",), ("numba-cuda",)),
    "cuda-core": Entry("cuda.core with NVRTC", "jitted", ("core",), ("cuda-core",)),
    "blas": _native("blas", "cuBLAS"),
    "thrust": _native("thrust", "thrust, sorting"),
    "dynamic": _native("dynamic", "kernels that launch kernels"),
    "cooperative": _native("cooperative", "cooperative launch"),
    "texture": _native("texture", "texture and surface of one array"),
    "mapped": _native("mapped", "mapped host memory"),
    "registered": _native("registered", "registered host memory"),
    "callback": _native("callback", "host functions in a stream"),
    "conditional": _native("conditional", "graph with a conditional node"),
    "destroyed": _native("destroyed", "streams destroyed while they work"),
}

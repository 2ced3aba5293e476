"""The programs of the matrix (:mod:`bench.matrix`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """A program of ``bench/programs`` with its ``words`` and ``environment``.

    ``compare``: how many lines it prints between one step of the trial and the next. ``packages``
    are those whose versions matter. ``remedy`` says what to do if it is refused. ``gpus`` are how
    many it needs; ``torchrun``: it starts one process of it for each.
    """

    title: str
    program: str
    words: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("torch",)
    environment: Mapping[str, str] = field(default_factory=dict)
    compare: int = 20
    remedy: str = ""
    gpus: int = 1
    torchrun: bool = False


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


def _native(way: str, title: str, gpus: int = 1) -> Entry:
    return Entry(f"CUDA C++: {title}", "native.cu", (way,), (), compare=100, gpus=gpus)


def _distributed(way: str, title: str, *more: str, gpus: int = 2, torchrun: bool = False) -> Entry:
    start = "torchrun" if torchrun else "mp.spawn"
    words = (way, "--ranks", str(gpus), "--resident", "4", *more)
    return Entry(
        f"{title}, {start}, {gpus} GPUs", "distributed", words, gpus=gpus, torchrun=torchrun
    )


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
    "ddp": _distributed("ddp", "DDP", torchrun=True),
    "ddp-spawn": _distributed("ddp", "DDP", "--port", "29521"),
    "fsdp": _distributed("fsdp", "FSDP2", torchrun=True),
    "fsdp-spawn": _distributed("fsdp", "FSDP2", "--port", "29522"),
    "tensor": _distributed("tensor", "tensor parallel (DTensor)", torchrun=True),
    "pipeline": _distributed("pipeline", "pipeline (GPipe)", torchrun=True),
    "gloo": _distributed("gloo", "DDP, gloo beside NCCL", "--port", "29523"),
    "shared-tensors": Entry("torch.multiprocessing, a shared tensor", "shared_tensors"),
    "parameter-server": Entry("parameter server by RPC, 2 GPUs", "parameter_server", gpus=2),
    "served": Entry(
        "Llama generates text, tensor parallel, 2 GPUs",
        "served",
        (),
        ("torch", "transformers"),
        compare=4,
        gpus=2,
        torchrun=True,
    ),
    "sharded": Entry("JAX, shard_map over 2 GPUs", "sharded", (), ("jax",), gpus=2),
    "peers": _native("peers", "2 GPUs, peer access", gpus=2),
}

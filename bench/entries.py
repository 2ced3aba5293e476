"""The programs of the matrix (:mod:`bench.matrix`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SERVERS = "Inference servers"
TRAINING = "Training frameworks"
ARRAYS = "JAX, CuPy, numba, Triton"
NATIVE = "CUDA C++ and the driver"
DATA = "Data pipelines and simulation"
NOTEBOOKS = "Notebooks"
TOOLS = "Profilers and debuggers"
LONG = "Many jobs in a row"

_LONG = 100
"""Jobs of the programs that are suspended or saved again and again."""


@dataclass(frozen=True)
class Entry:
    """A program of ``bench/programs`` with its ``words`` and ``environment``.

    ``compare``: how many lines it prints between one step of the trial and the next. ``packages``
    are those that it needs, and whose versions matter. ``remedy`` says what to do if it is refused.
    ``gpus`` are how many it needs; ``torchrun``: it starts one process of it for each. ``options``
    are those of ``phos checkpoint``. It is saved ``checkpoints`` times, after so many
    ``suspensions``.
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
    options: tuple[str, ...] = ()
    checkpoints: int = 2
    suspensions: int = 0


def _vllm(form: str, port: int, *more: str, gpus: int = 1) -> Entry:
    """An entry whose server has a port of its own, as several run at a time."""
    return Entry(
        f"vLLM, {form}",
        "asked",
        ("vllm", "--port", str(port), *more),
        ("vllm", "torch"),
        compare=6,
        gpus=gpus,
    )


def _data_loader(start: str, *more: str) -> Entry:
    shown = " ".join((start, *(each.lstrip("-") for each in more)))
    return Entry(
        f"PyTorch DataLoader, 4 workers ({shown}), pinned memory; ResNet-50 of timm",
        "data_loader",
        ("--start", start, *more),
        ("torch", "timm"),
    )


def _compiled(mode: str) -> Entry:
    return Entry(f"torch.compile, mode {mode}", "compiled", ("--mode", mode))


def _native(way: str, title: str, gpus: int = 1) -> Entry:
    return Entry(title, "native.cu", (way,), (), compare=100, gpus=gpus)


def _resident(way: str, title: str) -> Entry:
    return Entry(title, "resident.cu", (way,), (), compare=40)


def _distributed(
    way: str,
    title: str,
    *more: str,
    gpus: int = 2,
    torchrun: bool = False,
    **environment: str,
) -> Entry:
    start = "torchrun" if torchrun else "mp.spawn"
    return Entry(
        f"{title}, {start}, {gpus} GPUs",
        "distributed",
        (way, "--ranks", str(gpus), "--resident", "4", *more),
        environment=environment,
        gpus=gpus,
        torchrun=torchrun,
    )


def _collective(way: str, title: str, port: int) -> Entry:
    return Entry(f"{title}, 2 GPUs", "collectives", (way, "--port", str(port)), gpus=2)


_SERVERS = {
    "vllm": _vllm("1B, eager", 8321, "--", "--enforce-eager", "--gpu-memory-utilization", "0.15"),
    "vllm-graphs": _vllm(
        "1B, compiled, CUDA graphs", 8322, "--", "--gpu-memory-utilization", "0.15"
    ),
    "vllm-8b": _vllm(
        "8B, eager",
        8323,
        *("--size", "8b", "--", "--enforce-eager", "--gpu-memory-utilization", "0.4"),
    ),
    "vllm-8b-graphs": _vllm(
        "8B, compiled, CUDA graphs",
        8324,
        *("--size", "8b", "--", "--gpu-memory-utilization", "0.4"),
    ),
    "vllm-tensor": _vllm(
        "1B, eager, tensor parallel, 2 GPUs",
        8325,
        *("--", "--tensor-parallel-size", "2", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.15"),
        gpus=2,
    ),
    "vllm-sleep": _vllm(
        "1B, eager, sleep mode",
        8326,
        *("--sleeps", "--", "--enable-sleep-mode", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.15"),
    ),
    "transformers-serve": Entry(
        "transformers serve, continuous batching",
        "asked",
        ("transformers", "--port", "8327", "--", "--continuous-batching"),
        ("transformers", "torch", "fastapi", "uvicorn", "openai"),
        compare=6,
    ),
    "served": Entry(
        "transformers, Llama generates text, tensor parallel, 2 GPUs",
        "served",
        (),
        ("torch", "transformers"),
        compare=4,
        gpus=2,
        torchrun=True,
    ),
    "generate": Entry(
        "transformers, GPT-2 XL generates text",
        "generate",
        ("--size", "xl"),
        ("torch", "transformers"),
        compare=4,
    ),
}

_TRAINING = {
    "compile": _compiled("default"),
    "compile-graphs": _compiled("reduce-overhead"),
    "compile-autotune": _compiled("max-autotune"),
    "amp": Entry(
        "PyTorch, float16 with GradScaler, 8 GB resident", "trained", ("amp", "--resident", "8")
    ),
    "expandable": Entry(
        "PyTorch, expandable segments, 8 GB resident", "trained", ("expandable", "--resident", "8")
    ),
    "expandable-shared": Entry(
        "PyTorch, expandable segments shared between processes",
        "shared_tensors",
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "malloc-async": Entry(
        "PyTorch, cudaMallocAsync, 8 GB resident", "trained", ("async", "--resident", "8")
    ),
    "captured": Entry("PyTorch, a training step in a CUDA graph", "captured"),
    "trainer": Entry(
        "HF Trainer, 2 workers",
        "finetuned",
        ("trainer", "--size", "large"),
        ("torch", "transformers", "accelerate"),
    ),
    "trainer-checkpoints": Entry(
        "HF Trainer, 2 workers, with checkpoints of its own",
        "finetuned",
        ("trainer", "--size", "small", "--checkpoint-every", "20"),
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
        remedy="what Lightning imports had opened the GPU by OpenCL, which the driver does not "
        "save. `phos run` keeps NVIDIA's OpenCL away since; not tried again",
    ),
    "geometric": Entry(
        "PyTorch Geometric, graph network", "graph_network", (), ("torch", "torch-geometric")
    ),
    "gpt2": Entry(
        "transformers, GPT-2 small in training, deterministic",
        "gpt2",
        ("--size", "small", "--deterministic", "--fill", "6"),
        ("torch", "transformers"),
        compare=10,
    ),
    "offload": Entry(
        "Optimizer offload to pinned memory, as of DeepSpeed's ZeRO-Offload", "offload", compare=6
    ),
    "diffusion": Entry("Diffusion, U-Net with averaged weights, as of diffusers", "diffusion"),
    "agents": Entry("Reinforcement learning (DQN), 16 environments in processes", "agents"),
    "async-saved": Entry("torch.distributed.checkpoint, async_save", "async_saved"),
    "shared-tensors": Entry("torch.multiprocessing, a shared tensor", "shared_tensors"),
    "parameter-server": Entry("PyTorch RPC, parameter server, 2 GPUs", "parameter_server", gpus=2),
    "tree": Entry(
        "Actors below a process that only counts GPUs, as of Ray", "tree", (), ("cuda-bindings",)
    ),
    "ddp": _distributed("ddp", "PyTorch DDP", torchrun=True),
    "ddp-spawn": _distributed("ddp", "PyTorch DDP", "--port", "29521"),
    "gloo": _distributed("gloo", "PyTorch DDP, gloo beside NCCL", "--port", "29523"),
    "ddp-shm": _distributed(
        "ddp",
        "PyTorch DDP, NCCL by shared host memory",
        *("--port", "29524"),
        NCCL_P2P_DISABLE="1",
    ),
    "ddp-sockets": _distributed(
        "ddp",
        "PyTorch DDP, NCCL by sockets",
        *("--port", "29525"),
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_SOCKET_IFNAME="lo",
    ),
    "fsdp": _distributed("fsdp", "PyTorch FSDP2", torchrun=True),
    "fsdp-spawn": _distributed("fsdp", "PyTorch FSDP2", "--port", "29522"),
    "fsdp-4": _distributed("fsdp", "PyTorch FSDP2", "--port", "29526", gpus=4),
    "fsdp-legacy": _distributed(
        "fsdp",
        "PyTorch FSDP2, NCCL_CUMEM_ENABLE=0",
        *("--port", "29527"),
        NCCL_CUMEM_ENABLE="0",
    ),
    "tensor": _distributed("tensor", "PyTorch tensor parallel (DTensor)", torchrun=True),
    "pipeline": _distributed("pipeline", "PyTorch pipeline (GPipe)", torchrun=True),
    "pipeline-4": _distributed("pipeline", "PyTorch pipeline (GPipe)", gpus=4, torchrun=True),
    "collectives": _collective("groups", "NCCL, many communicators", 29528),
    "collectives-captured": _collective("captured", "NCCL, all-reduce in a CUDA graph", 29529),
    "symmetric": _collective("symmetric", "PyTorch symmetric memory", 29530),
    "nvshmem": _collective("nvshmem", "PyTorch symmetric memory by NVSHMEM", 29531),
}

_ARRAYS = {
    "jax": Entry("JAX, flax and optax", "jax_train", ("--share", "0.06"), ("jax", "flax")),
    "jax-grown": Entry(
        "JAX without preallocation",
        "jax_train",
        (),
        ("jax", "flax"),
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "orbax": Entry(
        "JAX, orbax saves in the background",
        "jax_train",
        ("--share", "0.06", "--save-every", "50"),
        ("jax", "flax", "orbax-checkpoint"),
    ),
    "sharded": Entry("JAX, shard_map over 2 GPUs", "sharded", (), ("jax",), gpus=2),
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
}

_NATIVE = {
    "blas": _native("blas", "cuBLAS"),
    "thrust": _native("thrust", "thrust, sorting"),
    "dynamic": _native("dynamic", "Dynamic parallelism: kernels that launch kernels"),
    "cooperative": _native("cooperative", "Cooperative launch"),
    "texture": _native("texture", "Texture and surface of one array"),
    "mapped": _native("mapped", "Host memory, mapped"),
    "registered": _native("registered", "Host memory, registered"),
    "callback": _native("callback", "Host functions in a stream"),
    "conditional": _native("conditional", "CUDA graph with a conditional node"),
    "destroyed": _native("destroyed", "Streams destroyed while they work"),
    "peers": _native("peers", "Peer access, 2 GPUs", gpus=2),
    "heap": _resident("heap", "Device heap: malloc in kernels"),
    "relaunched": _resident("relaunched", "CUDA graph that launches itself 20,000 times"),
    "pageable": _resident("pageable", "HMM: malloc's memory, written by kernels"),
    "threads": _resident("threads", "200 threads, a stream each"),
    "sparse-host": Entry(
        "Host memory, 40 GB of which 1% is written", "sparse_host", (), ("cuda-bindings",)
    ),
}

_DATA = {
    "loader-fork": _data_loader("fork"),
    "loader-forkserver": _data_loader("forkserver"),
    "loader-spawn": _data_loader("spawn"),
    "loader-persistent": _data_loader("fork", "--persistent"),
    "columns": Entry(
        "Arrow file, mapped, by CuPy; results in Parquet",
        "columns",
        (),
        ("cupy-cuda13x", "pyarrow"),
        remedy="its files go on beside the image: end the program with the checkpoint "
        "(`--end`), or restore with `--files cut`",
    ),
    "dynamics": Entry(
        "Molecular dynamics by numba, trajectory in a file", "dynamics", (), ("numba-cuda",)
    ),
}

_NOTEBOOKS = {
    "notebook": Entry(
        "Jupyter: ipykernel with its client",
        "notebook",
        (),
        ("ipykernel", "jupyter-client", "torch"),
        remedy="IPython's history goes on beside the image: end the kernel with the checkpoint "
        "(`--end`), or start it with `--HistoryManager.enabled=False`",
    ),
}

_TOOLS = {
    "profiled": Entry(
        "torch.profiler, two of six steps",
        "trained",
        ("profiled",),
        remedy="save it before it profiles, or start it without",
    ),
}

_LONG_RUNS = {
    "suspended-100": Entry(
        "Suspended and resumed a hundred times",
        "recurrence",
        ("--mib", "16"),
        ("cuda-bindings",),
        suspensions=_LONG,
    ),
    "saved-100": Entry(
        "Saved a hundred times",
        "recurrence",
        ("--mib", "16"),
        ("cuda-bindings",),
        checkpoints=_LONG,
    ),
}

KINDS: dict[str, dict[str, Entry]] = {
    SERVERS: _SERVERS,
    TRAINING: _TRAINING,
    ARRAYS: _ARRAYS,
    NATIVE: _NATIVE,
    DATA: _DATA,
    NOTEBOOKS: _NOTEBOOKS,
    TOOLS: _TOOLS,
    LONG: _LONG_RUNS,
}
ENTRIES = {name: entry for entries in KINDS.values() for name, entry in entries.items()}

"""Print the folder that holds ``cuda.h``: NVIDIA's runtime wheel, else an installed toolkit."""

import os
import site
import sys
from pathlib import Path


def candidates() -> list[Path]:
    roots = [Path(p) for p in (*sys.path, *site.getsitepackages()) if p]
    wheels = [root / "nvidia" / "cu13" / "include" for root in roots]
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return [*wheels, Path(toolkit) / "include"]


def main() -> None:
    for folder in candidates():
        if (folder / "cuda.h").is_file():
            print(folder)
            return
    sys.exit(
        "cuda.h was not found. Install the wheel nvidia-cuda-runtime (13.0), or set "
        "-DPHOS_CUDA_INCLUDE to the include folder of a CUDA 13 toolkit."
    )


if __name__ == "__main__":
    main()

"""Launch an empty kernel again and again. Prints how many milliseconds each took to complete."""

import time

from cuda.bindings import driver
from device import context, functions, launch, ok


def main() -> None:
    context()
    (nothing,) = functions(b'extern "C" __global__ void nothing() {}', b"nothing")
    while True:
        began = time.monotonic()
        launch(nothing, 0)
        ok(driver.cuCtxSynchronize())
        print(f"{(time.monotonic() - began) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()

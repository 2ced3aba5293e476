"""What every test of this process must see before the first of them loads a CUDA driver."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("PHOS_GPU", "soft")
os.environ.setdefault("PHOS_SOFTGPU_DEVICES", "2")

# The software GPU's memory is the machine's. Tests beside these, and other people's programs, have
# devices of their own.
devices = Path(tempfile.mkdtemp(prefix="phos-test-gpu-"))
devices.chmod(0o755)  # some programs are other users'
os.environ["PHOS_SOFTGPU_DIR"] = str(devices / "gpu")

# A job in the background is started with these ignored, and what it starts would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)


def pytest_unconfigure() -> None:
    shutil.rmtree(devices)

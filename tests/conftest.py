"""What every test of this process must see before the first of them loads a CUDA driver."""

import os
import signal

os.environ.setdefault("PHOS_GPU", "soft")
os.environ.setdefault("PHOS_SOFTGPU_DEVICES", "2")

# A job in the background is started with these ignored, and what it starts would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)

"""What every test of this process must see before the first of them loads a CUDA driver."""

import os

os.environ.setdefault("PHOS_GPU", "soft")
os.environ.setdefault("PHOS_SOFTGPU_DEVICES", "2")

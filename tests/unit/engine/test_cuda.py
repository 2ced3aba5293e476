"""Which driver this node has, and what is said when there is none."""

from pathlib import Path

import pytest

from phosd.engine.system import cuda, native
from phosd.errors import Unsupported


def test_neither_a_driver_nor_the_software_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout that was not built, on a machine without a GPU."""
    monkeypatch.setenv("PHOS_GPU", "soft")
    monkeypatch.delenv("PHOS_NATIVE_DIR", raising=False)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "phosd/engine/system/native.py"))
    for ask in (cuda.software_gpu, cuda.bindings.__wrapped__):
        with pytest.raises(Unsupported, match="no NVIDIA driver, and the software GPU") as raised:
            ask()
        assert "make build" in raised.value.hint
        assert str(tmp_path) in str(raised.value)

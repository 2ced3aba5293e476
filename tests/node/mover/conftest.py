"""Each test has a software GPU of its own: device memory is otherwise shared by the machine."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_device(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the software GPU accounts for its memory."""
    folder = tmp_path_factory.mktemp("device")
    monkeypatch.setenv("PHOS_SOFTGPU_DIR", str(folder))
    return folder

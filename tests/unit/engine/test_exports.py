"""What phosd.engine exports: all is there, and nothing is imported before it is used."""

import subprocess
import sys

import pytest

import phosd.engine


def test_what_is_exported_is_there() -> None:
    for name in phosd.engine.__all__:
        assert getattr(phosd.engine, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'phosd\.engine' has no attribute 'Nod'"):
        _ = phosd.engine.Nod  # type: ignore[attr-defined]


def test_the_package_imports_none_of_it() -> None:
    code = "import sys, phosd.engine; print(*(n for n in sys.modules if n.startswith('phosd.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"phosd.engine", "phosd.exports"}

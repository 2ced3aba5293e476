"""Fetch what phosd imports, in the versions with which it was tested, to be part of a package."""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from deb_suites import Suite, require_complete

ROOT = Path(__file__).parents[1]
NOT_OURS_TO_GIVE = ("nvidia-cuda-",)
"""Beginnings of packages whose licence forbids that; `phos setup-analysis` fetches them."""
NOT_BUNDLED = {*("demo", "dev", "remote"), *("test-cri", "test-kubernetes", "test-s3")}
"""Extras that the package does without."""

Command = Sequence[str | Path]


def run(command: Command, what: str) -> str:
    """Run a command and return its output; on failure, exit with its error output."""
    words = [str(word) for word in command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode != 0:
        sys.exit(f"{what} failed ({words[0]} returned {done.returncode}):\n{done.stderr}")
    return done.stdout


def bundled(cache: Path, suite: Suite) -> Path:
    """Return a folder with phosd's imports, fetched once for each release and set of versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    for name in sorted(extras.keys() - NOT_BUNDLED):
        wanted += [each for each in extras[name] if not each.startswith(NOT_OURS_TO_GIVE)]
    pip: Command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    versions = run([*pip, "freeze", "--exclude-editable"], "reading the installed versions")
    key = hashlib.sha256("\n".join([sys.version, *wanted, versions]).encode()).hexdigest()
    python = ".".join(map(str, suite.python))
    folder = cache / f"python{python}-{key[:16]}"
    if not folder.exists():
        for old in (*cache.glob("python-*"), *cache.glob(f"python{python}-*")):
            shutil.rmtree(old)
        fresh = cache / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        (cache / "versions.txt").write_text(versions)
        install: Command = ["install", "--quiet", "--no-compile", "--target", fresh]
        choose: Command = ["--only-binary=:all:", "--constraint", cache / "versions.txt"]
        other: Command = ["--python-version", python]
        run([*pip, *install, *choose, *other, *wanted], "fetching what phosd imports")
        require_complete(fresh, python)
        fresh.rename(folder)
    return folder

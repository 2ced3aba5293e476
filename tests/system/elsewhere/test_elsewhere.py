"""Images go to another machine: a phosd with another key that knows nothing of the first."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phosd.client.transfer import head_of
from phosd.engine.system.cuda import is_software
from tests.support.harness import PROGRAMS, alive, parse, running, wait_until
from tests.system.cli.test_json import check
from tests.system.service.test_end_to_end import phos, phosd

GPU = ("--gpu", "soft") if is_software() else ()


@contextmanager
def another_machine(folder: Path) -> Iterator[None]:
    """Within the context the phosd of this folder has another state: another key, and no images."""
    state, away = folder / "state", folder / "away"
    state.rename(away)
    try:
        yield
    finally:
        state.rename(folder / "other")
        away.rename(state)


def refused(bus: str, folder: Path, *words: str) -> dict[str, object]:
    """A command that must fail; its error."""
    done = subprocess.run(
        [sys.executable, "-m", "phosd.cli.main", "--json", "--bus", bus, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PHOS_RUNTIME_DIR": str(folder / "run")},
    )
    assert done.returncode != 0, done.stdout
    error: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return error


def build_ids(file: Path) -> dict[str, str]:
    """What tells builds of the program's files apart, by path, in an exported image."""
    with file.open("rb") as source:
        manifest = json.loads(head_of(source, str(file)).manifest)
    (tree,) = manifest["image"]["trees"]
    return {each["path"]: each.get("build_id", "") for each in tree["details"]["mapped_files"]}


def interrupted(bus: str, folder: Path, image: str) -> None:
    """An export to somebody who does not read on is ended by Ctrl-C, and holds nothing."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    words = [sys.executable, "-m", "phosd.cli.main", "--json", "--bus", bus]
    with (
        running([*words, "export", image, str(pipe)], stdout=subprocess.PIPE) as asking,
        pipe.open("rb") as reading,
    ):
        assert reading.read(8) == b"PHOSIMG\0"
        asking.send_signal(signal.SIGINT)
        said, _ = asking.communicate(timeout=60)
    assert json.loads(said.splitlines()[-1])["error"] == "Cancelled", said
    assert [job["state"] for job in phos(bus, folder, "jobs")][-1] == "cancelled"


def lies(heads: Path, image: str, newer: str) -> None:
    """Put into a store the head of an image under a newer id, one from the future, and rubbish."""
    for name in (newer, "29991231T235959-ffff"):
        shutil.copy(heads / f"{image}.phos", heads / f"{name}.phos")
    (heads / f"{newer[:-4]}fffe.phos").write_bytes(b"rubbish")


def test_a_program_goes_on_elsewhere(bus: str, tmp_path: Path) -> None:
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]
    file, key = tmp_path / "image.phos", tmp_path / "key"
    url, signers = f"file://{tmp_path}/images", tmp_path / "signers"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(words, check=True)
    signers.write_text(f"root {key.with_suffix('.pub').read_text()}")
    (tmp_path / "phosd.toml").write_text(f'allowed_signers = "{signers}"\n')
    with phosd(bus, tmp_path):
        (started,) = phos(bus, tmp_path, "run", *GPU, "--detach", "--", *single)
        pid, output = int(str(started["pid"])), Path(str(started["stdout"]))
        try:
            wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
            image = str(phos(bus, tmp_path, "checkpoint", str(pid))[-1]["result"])
            before = output.stat().st_size
            wait_until(lambda: len(parse(output.read_bytes()[before:])) > 10, "it to compute on")
        finally:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not alive(pid), "its end")
        told = phos(bus, tmp_path, "export", image, str(file))[-1]
        check([told], "`phos export`, `phos import`, `phos push`, `phos pull`")
        assert (told["image"], told["sent_chunks"]) == (image, told["chunks"])
        assert file.stat().st_mode & 0o077 == 0
        assert build_ids(file)[os.path.realpath(sys.executable)]
        assert "exists" in str(refused(bus, tmp_path, "export", image, str(file))["message"])
        assert "is a folder" in str(
            refused(bus, tmp_path, "export", image, str(tmp_path))["message"]
        )
        interrupted(bus, tmp_path, image)
        pushed = phos(bus, tmp_path, "push", image, url, "--sign", str(key))[-1]
        assert pushed == told
        twice = phos(bus, tmp_path, "push", image, url)[-1]
        assert (twice["sent_chunks"], twice["chunks"]) == (0, told["chunks"])
        back = phos(bus, tmp_path, "pull", url)
        assert (back[-1]["image"], back[-1]["sent_chunks"]) == (image, 0)
        assert f"here already, as {image}" in str(back[-2]["notes"])
    expected = parse(output.read_bytes())

    with another_machine(tmp_path), phosd(bus, tmp_path):
        assert phos(bus, tmp_path, "images") == []
        error = refused(bus, tmp_path, "import", str(file))
        assert error["error"] == "NotAuthorized" and "nobody has signed" in str(error["message"])
        checks = phos(bus, tmp_path, "import", str(file), "--trust", "--dry-run")
        assert [row["trouble"] for row in checks] == [None] * len(checks) != []
        error = refused(bus, tmp_path, "import", str(file), "--trust", "--owner", "nobody")
        assert (error["error"], "uid 0" in str(error["message"])) == ("NotAuthorized", True)
        first = str(phos(bus, tmp_path, "import", str(file), "--trust")[-1]["image"])
        phos(bus, tmp_path, "rm", first)
        newer = f"{image[:-4]}ffff"
        lies(tmp_path / "images/images", image, newer)
        listed = phos(bus, tmp_path, "pull", url, "--list")
        check(listed, "`phos pull --list`")
        assert [row["image"] for row in listed] == [image]
        error = refused(bus, tmp_path, "pull", url, newer)
        assert error["error"] == "ImageCorrupt"
        assert f"of '{image}', which was made at 20" in str(error["message"])
        here = str(phos(bus, tmp_path, "pull", url)[-1]["image"])  # it is signed
        assert here != image
        (stored,) = phos(bus, tmp_path, "images")
        assert (stored["id"], stored["pid"], stored["owner"]) == (here, pid, 0)
        phos(bus, tmp_path, "verify", here)
        output.parent.rename(tmp_path / "left behind")
        phos(bus, tmp_path, "restore", here)
        try:
            wait_until(
                lambda: len(parse(output.read_bytes()).keys() & expected.keys()) > 5,
                "the restored program",
            )
        finally:
            os.kill(pid, signal.SIGKILL)
        again = parse(output.read_bytes())
        common = again.keys() & expected.keys()
        assert {step: again[step] for step in common} == {s: expected[s] for s in common}
        operations = [row["operation"] for row in phos(bus, tmp_path, "history")]
        assert operations == ["restore", "verify", "import", "delete", *["import"] * 3]

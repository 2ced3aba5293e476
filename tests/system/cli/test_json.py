"""``--json`` prints what docs/reference/json.md says, key by key."""

import os
import re
import runpy
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from phosd.cli.json_rows import ROWS
from phosd.engine.hook_client.link import BlockFlag, HookBlock, Kernel
from phosd.engine.system.procfs import process_id
from tests.support.fake_engine import block, manifest, this_process
from tests.support.harness import running, wait_until
from tests.support.service import Service
from tests.system.cli.test_client import PHOS, lines, phos
from tests.system.cli.test_lists import as_nobody
from tests.system.cli.test_prune import full
from tests.system.cli.test_ps_details import KNOWN
from tests.system.service.test_moves import seen

__all__ = ["full"]

_JSON_TYPES = {
    "text": "string",
    "time": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "object": "object",
}
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/json.md"
MAKE_SCHEMAS = runpy.run_path(str(ROOT / "packaging/make_schemas.py"))
ME = str(os.getpid())
_TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "time": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "object": (dict,),
}


def section(heading: str) -> dict[str, tuple[str, str]]:
    """The keys below a heading, each with its type and what is said of it."""
    (text,) = re.findall(rf"(?ms)^##+ {re.escape(heading)}$(.*?)(?=^##|\Z)", PAGE.read_text())
    rows = re.findall(r"(?m)^\| `(\w+)` \| ([\w ]+) \|(.*)\|$", text)
    assert rows, heading
    return {key: (kind, said) for key, kind, said in rows}


def check(
    rows: Iterable[Mapping[str, object]], *headings: str, optional: Iterable[str] = ()
) -> None:
    """All rows have the keys below these headings and no others, of the types there; of what is in
    a list of objects, each key is named.
    """
    known = {key: told for heading in headings for key, told in section(heading).items()}
    found = list(rows)
    assert found
    for row in found:
        msgspec.convert(row, ROWS[headings[-1]])
        assert row.keys() - known.keys() == set(), "printed, and not on the page"
        assert known.keys() - row.keys() <= set(optional), "on the page, and not printed"
        for key, value in row.items():
            kind, said = known[key]
            base, _, null = kind.partition(" or ")
            if value is None:
                assert null, key
                continue
            assert isinstance(value, _TYPES[base]), (key, value)
            assert base == "bool" or not isinstance(value, bool), (key, value)
            if base == "time":
                datetime.strptime(str(value), "%Y-%m-%dT%H:%M:%SZ")
            for item in value if isinstance(value, list) else ():
                if isinstance(item, dict):
                    assert set(re.findall(r"`(\w+)`", said)) >= item.keys(), key


@pytest.mark.parametrize("heading", ROWS)
def test_the_types_are_those_of_the_page(heading: str) -> None:
    kinds = MAKE_SCHEMAS["of_lines"]()["$defs"]
    told, found = section(heading), kinds[ROWS[heading].__name__]["properties"]
    extended = found.keys() - told.keys()  # the line's own keys come after those of another
    assert found.keys() >= told.keys()
    assert extended in (set(), *(each["properties"].keys() for each in kinds.values()))
    for key, (written, said) in told.items():
        schema = found[key]
        types = {each.get("type") for each in schema.get("anyOf", [schema])}
        base, _, null = written.partition(" or ")
        assert types == {_JSON_TYPES[base], *(["null"] if null else [])}, key
        assert ("description" in schema) == bool(said.strip()), key


@pytest.fixture
def node(service: Service) -> Service:
    """A process with memory and kernels, an image with a block, and a job of each kind."""
    found = process_id(os.getpid())
    assert found is not None
    engine = service.engine
    engine.running = [this_process(start_time=found.start_time)]
    engine.live_blocks = [(HookBlock(1, 0x1000, 4096, 0, BlockFlag.EXPORTED), 0)]
    engine.launched = [Kernel("chase", 7, 3, suspect=True)]
    engine.stored["i"] = manifest("i", blocks=(block(1),))
    engine.go.set()
    return service


def test_jobs_while_they_run_and_afterwards(node: Service) -> None:
    for words in (
        ("checkpoint", ME, "--every", "1h"),
        ("verify", "i"),
        ("restore", "i"),
        ("migrate", ME, "--to", "0"),
        ("suspend", ME),
        ("resume", ME),
    ):
        check(lines(phos(node, *words, "--json").stdout), "Jobs")
    check(lines(phos(node, "jobs", "--json").stdout), "Jobs", "`phos jobs`")
    check(lines(phos(node, "jobs", "1", "--json").stdout), "Jobs", "`phos jobs`")
    left_out = ("details", "phases")  # of jobs of an older phosd
    check(lines(phos(node, "history", "--json").stdout), "`phos history`", optional=left_out)
    check(lines(phos(node, "events", "--json").stdout), "`phos events`", optional=["owner"])
    check(lines(phos(node, "ps", "--json").stdout), "`phos ps`")
    (row,) = lines(phos(node, "ps", "--json").stdout)
    assert (row["checkpoint_interval"], row["checkpoints_kept"]) == (3600, 5)


def test_things_and_details_of_them(node: Service) -> None:
    phos(node, "ps")
    check(lines(phos(node, "ps", ME, "--json").stdout), "`phos ps`", "`phos ps PID`")
    check(lines(phos(node, "ps", ME, "--log", "--json").stdout), "`phos ps PID --log`")
    node.engine.known = KNOWN
    check(lines(phos(node, "ps", ME, "--kernels", "--json").stdout), "`phos ps PID --kernels`")
    check(lines(phos(node, "gpus", "--json").stdout), "`phos gpus`")
    check(lines(phos(node, "status", "--json").stdout), "`phos status`")
    check(lines(phos(node, "images", "--json").stdout), "`phos images`")
    one = lines(phos(node, "images", "i", "--json").stdout)
    check(one, "`phos images`", "`phos images IMAGE`")
    check(lines(phos(node, "evacuate", "0", "--dry-run", "--json").stdout), "`phos evacuate`")
    check(lines(phos(node, "trust", ME, "--json").stdout), "`phos trust`")
    check(lines(phos(node, "rm", "i", "--json").stdout), "`phos rm`")
    failed = lines(phos(node, "restore", "none", "--json").stdout)
    check(failed, "Errors")


def test_what_is_pruned(full: Service) -> None:
    found = lines(phos(full, "prune", "--dry-run", "--json").stdout)
    check(found, "`phos prune`")
    done = lines(phos(full, "prune", "--yes", "--json").stdout)
    assert done[: len(found)] == found
    check(done[len(found) :], "`phos prune`: what was deleted")


def test_the_ends_of_a_schedule_and_of_a_standstill(node: Service) -> None:
    off = phos(node, "checkpoint", ME, "--every", "off", "--json")
    check(lines(off.stdout), "`phos checkpoint --every off`")

    def told_to_continue() -> list[dict[str, object]]:
        done = phos(node, "continue", ME, "--json")
        return lines(done.stdout) if done.returncode == 0 else []

    words = [*PHOS, "--bus", node.address, "checkpoint", ME, "--hold"]
    with running(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as held:
        check(wait_until(told_to_continue, "it to be held"), "`phos continue`")
        held.communicate()


def test_the_end_of_an_evacuation(node: Service) -> None:
    node.engine.running = [
        *(seen(os.getpid(), device_bytes=1), this_process(pid=3, hook_state="driver"))
    ]
    phos(node, "ps")
    *_, last = lines(phos(node, "evacuate", "0", "--yes", "--json").stdout)
    check([last], "`phos evacuate`: at the end")


def test_what_is_recovered(node: Service) -> None:
    """By root itself, and by phosd for others."""
    check(lines(phos(node, "recover", ME, "--json").stdout), "`phos recover PID`")
    with subprocess.Popen(["sleep", "1000"], user=65534) as process:
        try:
            asked = as_nobody(node, "recover", str(process.pid), "--json")
            check(lines(asked.stdout), "`phos recover PID`", optional=["done"])
        finally:
            process.kill()


def test_the_doctor_and_a_program(
    node: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    check(lines(phos(node, "doctor", "--json").stdout), "`phos doctor`")
    started = phos(node, "run", "--detach", "--json", "--gpu", "soft", "--", "true")
    check(lines(started.stdout), "`phos run --detach`")

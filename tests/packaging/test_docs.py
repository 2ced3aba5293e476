"""Man pages, the configuration that is installed, and completions: they say what is there."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
import pytest

from phosd.cli.main import main as phos
from phosd.cli.main import named
from phosd.service import config
from phosd.service.config import Config
from phosd.service.config_values import read
from phosd.service.jobs.limits import KeptFile, UserLimits
from phosd.service.jobs.pool import PoolRule
from phosd.service.jobs.schedule import PeriodicRule
from phosd.service.main import parser
from phosd.tui.actions import ACTIONS
from phosd.tui.app import SCREENS
from phosd.tui.main import main as phos_tui

ROOT = Path(__file__).parents[2]
MAKE_DOCS = runpy.run_path(str(ROOT / "packaging/make_docs.py"))
SAMPLE = ROOT / "packaging/phosd.toml"
PAGES = ("phos.1", "phos-tui.1", "phosd.8", "phosd.toml.5")
_SETTING = re.compile(r"(?m)^# (?=[a-z_]+ = |\[\[)")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``packaging/make_docs.py`` fills."""
    folder = tmp_path_factory.mktemp("docs")
    subprocess.run(
        [sys.executable, ROOT / "packaging/make_docs.py", folder],
        env=os.environ | {"PYTHONPATH": str(ROOT), "SOURCE_DATE_EPOCH": "1795000000"},
        check=True,
    )
    return folder


def shown(page: Path) -> str:
    """A page as ``man`` shows it, without line breaks in long words or paragraphs."""
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-P-cbou", "-rLL=500n", "-rHY=0", "-ww", page],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.replace("\N{MINUS SIGN}", "-").replace("\N{HYPHEN}", "-")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_without_warnings(made: Path, name: str) -> None:
    text = shown(made / "man" / name)
    assert name.rpartition(".")[0] in text
    assert " 2026-11-18 " in text.splitlines()[-1], "the date of the sources"
    assert "\nEXAMPLES\n" in text
    assert not re.search("@[A-Z]+@", text), "what make_docs.py fills in"


def test_the_page_of_phos_has_every_command_and_option(made: Path) -> None:
    text = shown(made / "man/phos.1")
    commands = [command for command in map(named, phos.commands) if not command.hidden]
    assert len(commands) > 8
    for command in commands:
        assert f"\n   {command.name} [OPTIONS]" in text
        summary = (command.help or "").strip().split("\n\n")[0]
        assert " ".join(summary.split()) in " ".join(text.split())
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                for flag in parameter.opts:
                    assert re.search(rf"(?m)^ +(-\w, )?{flag}\b", text), (command.name, flag)


def test_the_page_of_phos_tui_has_every_option_and_action(made: Path) -> None:
    text = " ".join(shown(made / "man/phos-tui.1").split())
    for parameter in phos_tui.params:
        assert f"{parameter.opts[0]} " in text, parameter.name
    for action in ACTIONS:
        assert action.help in text, action.id


def test_the_page_about_phos_tui_has_the_keys_of_the_table() -> None:
    page = (ROOT / "docs/operate/tui.md").read_text()
    assert MAKE_DOCS["keys_table"](page) == page, "python packaging/make_docs.py --keys writes them"
    for action in ACTIONS:
        assert f" {action.name} | {action.help} |" in page, action.id
    assert {action.scope for action in ACTIONS} == set(MAKE_DOCS["SCOPES"])


def test_the_page_about_phos_tui_has_every_screen_option_and_feature() -> None:
    page = (ROOT / "docs/operate/tui.md").read_text()
    for number, screen in enumerate(SCREENS, 1):
        assert f"| `{number}` {screen.TITLE_TEXT} |" in page
    for parameter in phos_tui.params:
        assert f"`{parameter.opts[0]}`" in page, parameter.name
    for feature in {action.feature for action in ACTIONS if action.feature}:
        assert f"`{feature}`" in page, feature


def test_the_page_of_phosd_has_every_option(made: Path) -> None:
    text = shown(made / "man/phosd.8")
    usage = parser().format_usage()
    flags = re.findall(r"--[a-z-]+|-h", usage)
    assert len(flags) > 5
    for flag in flags:
        assert re.search(rf"(?m)^ +{flag}\b", text), flag


TABLES = {"periodic", "limits", "files", "pools"}


def keys(kind: type[msgspec.Struct]) -> set[str]:
    return {*kind.__struct_fields__}


def assert_defaults(kind: type[msgspec.Struct], shown: Mapping[str, str]) -> None:
    """Compare the defaults that a page shows, as TOML, with those that are plain values."""
    for field in msgspec.structs.fields(kind):
        if field.default not in (None, "", (), msgspec.NODEFAULT):
            value = tomllib.loads(f"value = {shown[field.name]}")["value"]
            assert read(field.type, value) == field.default, field.name


def test_every_setting_is_explained(made: Path) -> None:
    sample = _SETTING.sub("", SAMPLE.read_text())
    settings, *tables = re.split(r"(?m)^(?=\[\[)", sample)
    found = {text[2 : text.index("]]")]: set(re.findall(r"(?m)^(\w+) =", text)) for text in tables}
    assert set(re.findall(r"(?m)^(\w+) =", settings)) == keys(Config) - TABLES
    rules: dict[str, type[msgspec.Struct]] = {
        "periodic": PeriodicRule,
        "limits": UserLimits,
        "files": KeptFile,
        "pools": PoolRule,
    }
    assert found == {name: keys(rule) for name, rule in rules.items()}
    text = shown(made / "man/phosd.toml.5")
    for key in keys(Config).union(*map(keys, rules.values())):
        assert re.search(rf"\b{key}\b", text), key


def test_the_file_that_is_installed_holds_the_defaults(tmp_path: Path) -> None:
    assert config.load(SAMPLE) == Config()
    everything = tmp_path / "phosd.toml"
    everything.write_text(_SETTING.sub("", SAMPLE.read_text()))
    loaded = config.load(everything)
    assert loaded.periodic[0].keep == PeriodicRule(every=1).keep
    assert loaded.limits[0].keep_last is UserLimits().keep_last
    for name in keys(Config) - TABLES:
        default = getattr(Config(), name)
        if default not in (None, ""):
            assert getattr(loaded, name) == default, f"{name}: the file shows another default"


def test_the_man_page_shows_the_defaults(made: Path) -> None:
    text = shown(made / "man/phosd.toml.5").partition("\nEXAMPLES\n")[0]
    assert_defaults(Config, dict(re.findall(r"(?m)^ +(\w+) = (.+)$", text)))


def test_the_page_about_d_bus_has_every_setting_with_its_default() -> None:
    page = (ROOT / "docs/reference/dbus.md").read_text()
    section = page.partition("\n## Configuration\n")[2].partition("\n## ")[0]
    _, *tables = section.split("| key | default | |")
    kinds: list[type[msgspec.Struct]] = [Config, PeriodicRule, UserLimits, KeptFile, PoolRule]
    for kind, table in zip(kinds, tables, strict=True):
        rows = re.findall(r"(?m)^\| `(\w+)` \| (.*?) \|", table)
        assert sorted(key for key, _ in rows) == sorted(keys(kind) - TABLES)
        assert_defaults(kind, {key: default.strip("`") for key, default in rows})


def test_bash_completes_commands_and_options(made: Path) -> None:
    def complete(*words: str) -> list[str]:
        name = words[0]
        script = made / "completion/bash" / name
        ask = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        ask += f"_{name.replace('-', '_')}_completion {name}"
        done = subprocess.run(
            ["bash", "-c", f'{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"', "bash", script, *words],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert complete("phos", "ch") == ["checkpoint"]
    assert complete("phos", "checkpoint", "--mo") == ["--mode"]
    assert complete("phos", "checkpoint", "--mode", "re") == ["recopy"]
    assert complete("phos-tui", "--rea") == ["--readonly"]


@pytest.mark.parametrize(
    ("shell", "name"),
    [("zsh", "_phos"), ("fish", "phos.fish"), ("zsh", "_phos-tui"), ("fish", "phos-tui.fish")],
)
def test_other_shells_have_their_completion(made: Path, shell: str, name: str) -> None:
    text = (made / "completion" / shell / name).read_text()
    variable = "_PHOS_TUI_COMPLETE" if "tui" in name else "_PHOS_COMPLETE"
    assert f"{variable}={shell}_complete" in text

"""The Ansible role: it writes what the page about an apt repository and phosd itself have."""

import re
from pathlib import Path

import yaml

from phosd.service import config
from phosd.service.main import parser

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "deploy/ansible/roles/phosd"
PAGE = (ROOT / "docs/operate/apt-repository.md").read_text()
TASKS = yaml.safe_load((ROLE / "tasks/main.yml").read_text())
DEFAULTS = yaml.safe_load((ROLE / "defaults/main.yml").read_text())


def test_nodes_get_the_source_of_the_page() -> None:
    (shown,) = re.findall(r"(?s)^```\n(Types: deb\n.*?)^```", PAGE, re.MULTILINE)
    template = (ROLE / "templates/phosd.sources.j2").read_text()
    filled = template.replace("{{ phosd_repository }}", DEFAULTS["phosd_repository"])
    filled = re.sub(r"\{\{ ansible_facts\['distribution_release'\] \}\}", "noble", filled)
    assert filled == shown
    key, source, *_ = TASKS
    assert f"Signed-By: {key['ansible.builtin.copy']['dest']}\n" in shown
    assert f"`{source['ansible.builtin.template']['dest']}`" in PAGE


def test_settings_are_checked_and_put_where_phosd_reads_them() -> None:
    (settings,) = (task for task in TASKS if "validate" in str(task))
    assert settings["ansible.builtin.copy"]["dest"] == str(config.DEFAULT_FILE)
    _, *options = settings["ansible.builtin.copy"]["validate"].replace("%s", "FILE").split()
    asked = parser().parse_args(options)
    assert asked.check_config and asked.config == Path("FILE")
    (handler,) = yaml.safe_load((ROLE / "handlers/main.yml").read_text())
    assert settings["notify"] == handler["name"]


def test_all_variables_have_defaults() -> None:
    texts = "".join(path.read_text() for path in ROLE.rglob("*") if path.is_file())
    registered = {task["register"] for task in TASKS if "register" in task}
    assert set(re.findall(r"\bphosd_\w+", texts)) - registered == set(DEFAULTS)
    (play,) = yaml.safe_load((ROLE.parents[1] / "playbook.yml").read_text())
    assert set(play["roles"][0]["vars"]) <= set(DEFAULTS)

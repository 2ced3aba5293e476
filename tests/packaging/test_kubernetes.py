"""The DaemonSet of deploy/kubernetes: it gives phosd's image the rights that the image's page names
and the image's tests run with, and no more. Where `make test-all` has installed Kubernetes' own
schemas, these judge every field.
"""

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from phosd import __version__
from phosd.cli.main import main as phos
from phosd.engine.system import from_image
from phosd.service import config
from tests.support.host import FEWEST, RIGHTS
from tests.support.rotation import EVERYTHING

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
SCHEMAS = ("1.30", "1.37")
"""The first Kubernetes that has all fields, and the newest whose schema is pinned."""

IMAGE_PAGE = (ROOT / "docs/operate/image.md").read_text()
KUBERNETES_PAGE = (ROOT / "docs/operate/kubernetes.md").read_text()


def objects() -> dict[str, Any]:
    """Each object, by its kind."""
    read = [yaml.safe_load((FOLDER / name).read_text()) for name in KUSTOMIZATION["resources"]]
    found = {each["kind"]: each for each in read}
    assert len(found) == len(read)
    return found


DAEMON_SET = objects()["DaemonSet"]
POD = DAEMON_SET["spec"]["template"]["spec"]
(PHOSD,) = POD["containers"]


def capabilities(options: str) -> set[str]:
    """Those that options of podman add."""
    return {
        each for found in re.findall(r"--cap-add=([A-Z_,]+)", options) for each in found.split(",")
    }


def test_all_files_are_used() -> None:
    (made,) = KUSTOMIZATION["configMapGenerator"]
    used = {"kustomization.yaml", *KUSTOMIZATION["resources"], *made["files"]}
    assert used == {path.name for path in FOLDER.iterdir()}
    assert set(objects()) == {"Namespace", "ServiceAccount", "DaemonSet"}, "no role"
    assert made["files"] == [config.DEFAULT_FILE.name]
    assert config.load(FOLDER / "phosd.toml") == config.Config()
    assert objects()["Namespace"]["metadata"]["name"] == KUSTOMIZATION["namespace"]


def test_the_image_is_that_of_this_version() -> None:
    tags = {each["image"].rpartition(":")[2] for each in (*POD["initContainers"], PHOSD)}
    assert tags == {f"{__version__}-deb12u1"}, "as packaging/build_image.py names it on Debian 12"
    assert tags.pop() in KUBERNETES_PAGE


def test_it_has_the_capabilities_that_the_page_names() -> None:
    (enough,) = re.findall(
        r"(?s)To suspend, resume and move programs, and no more, .*?\n\n", IMAGE_PAGE
    )
    assert capabilities(enough) == capabilities(" ".join(FEWEST)), "with which the image is tested"
    named = {
        word for span in re.findall(r"`([^`]+)`", enough) for word in re.findall(r"[A-Z_]+", span)
    }
    given = PHOSD["securityContext"]["capabilities"]
    assert set(given["add"]) == named - {"ALL"}
    assert len(given["add"]) == len(set(given["add"]))
    assert given["drop"] == ["ALL"]


def test_it_has_the_other_rights_that_the_image_is_tested_with() -> None:
    assert {"--pid=host", "--security-opt=seccomp=unconfined"} < {*RIGHTS}
    rights = PHOSD["securityContext"]
    assert POD["hostPID"] is True
    assert rights["seccompProfile"] == rights["appArmorProfile"] == {"type": "Unconfined"}
    assert rights["runAsUser"] == 0
    for widest in ("privileged", "procMount"):
        assert widest not in rights
    for other in ("hostNetwork", "hostIPC", "hostUsers"):
        assert other not in POD
    assert "volumeMounts" not in PHOSD
    assert f"--stop-timeout={POD['terminationGracePeriodSeconds']}" in IMAGE_PAGE


def test_each_right_has_its_reason_beside_it() -> None:
    text = (FOLDER / "daemonset.yaml").read_text()
    for capability in PHOSD["securityContext"]["capabilities"]["add"]:
        assert re.search(rf"(?m)^ +- {capability} # .{{8,}}$", text), capability
    for right in ("hostPID", "runAsUser", "seccompProfile", "appArmorProfile", "hostPath"):
        assert re.search(rf"(?m)#.*\n *(?:- )?{right}:|^ *{right}:.*#", text), right
        assert f"`{right}" in KUBERNETES_PAGE, right


def test_the_page_widens_what_is_there() -> None:
    (block,) = re.findall(r"(?s)```yaml\n(patches:.*?)```", KUBERNETES_PAGE)
    (patch,) = yaml.safe_load(block)["patches"]
    assert patch["target"] == {"kind": "DaemonSet", "name": DAEMON_SET["metadata"]["name"]}
    (change,) = yaml.safe_load(patch["patch"])
    place: Any = DAEMON_SET
    for step in change["path"].removeprefix("/").split("/"):
        place = place[int(step) if step.isdigit() else step]
    assert place == PHOSD["securityContext"]["capabilities"]
    assert change["value"] == {"add": ["ALL"]} and "--cap-add=ALL" in RIGHTS


def test_settings_come_to_where_phosd_reads_them() -> None:
    check, put = POD["initContainers"]
    places = {each["name"]: each for each in POD["volumes"]}
    node = places.pop("node-settings")["hostPath"]
    assert node == {"path": str(config.DEFAULT_FILE.parent), "type": "DirectoryOrCreate"}
    assert [*places] == ["settings"], "the one folder of the node"
    assert f'"{config.DEFAULT_FILE}")' in put["args"][0]
    compile(put["args"][0], "put-settings", "exec")
    for container in (check, put):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "--check-config" in check["command"]


def test_what_containers_and_probes_run_is_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "packaging")
    build_image = runpy.run_path(str(ROOT / "packaging/build_image.py"))
    programs = {str(from_image.HOME / "bin" / name) for name in build_image["_PROGRAMS"]}
    programs.add(f"/{build_image['RUNTIME']}/bin/python3")
    commands = [each["command"] for each in POD["initContainers"]]
    commands += [PHOSD[probe]["exec"]["command"] for probe in ("startupProbe", "livenessProbe")]
    for program, *words in commands:
        assert program in programs
        assert program.rpartition("/")[2] != "phos" or words[0] in phos.commands


def test_an_update_keeps_to_one_phosd_on_a_node() -> None:
    assert DAEMON_SET["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    labels = DAEMON_SET["spec"]["template"]["metadata"]["labels"]
    assert DAEMON_SET["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_account_has_no_token() -> None:
    account = objects()["ServiceAccount"]
    assert account["automountServiceAccountToken"] is POD["automountServiceAccountToken"] is False
    assert account["metadata"]["name"] == POD["serviceAccountName"]


@pytest.mark.skipif(not EVERYTHING, reason="`make test-all` installs kubectl and schemas")
@pytest.mark.parametrize("version", SCHEMAS)
def test_kubernetes_takes_every_field_of_what_kubectl_applies(version: str) -> None:
    import kubernetes_validate

    command = ["kubectl", "kustomize", str(FOLDER)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made = {each["kind"]: each for each in yaml.safe_load_all(built)}
    assert set(made) == {*objects(), "ConfigMap"}
    for each in made.values():
        kubernetes_validate.validate(each, version, strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "phosd"
    pod = made["DaemonSet"]["spec"]["template"]["spec"]
    names = [each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each]
    assert names == [made["ConfigMap"]["metadata"]["name"]] != ["phosd"], "by its content"
    pod["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        kubernetes_validate.validate(made["DaemonSet"], version, strict=True)

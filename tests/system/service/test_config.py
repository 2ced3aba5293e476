"""The configuration: what it can say, and how its mistakes are told."""

import json
import pwd
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from phosd.engine.operations.admission import SizeOrShare
from phosd.service import config as configuration
from phosd.service import main
from phosd.service.config import Config, ConfigError, json_schema, load
from phosd.service.config_values import size
from phosd.service.jobs.limits import NO_LIMITS, KeptFile, UserLimits, limits_of
from phosd.service.jobs.pool import PoolRule
from phosd.service.jobs.schedule import PeriodicRule
from tests.support.fake_engine import this_process
from tests.support.service import phosd

GOOD = """
state_dir = "/srv/phos"
ring_bytes = "256 MiB"
staging_limit = 1073741824
retention_days = 7
rescan_seconds = 1.5
shadow_limit = 0
standby_movers = true
allow_unsafe_driver = true
max_jobs = 3
jobs_per_gpu = 1
min_free = "2.5%"
memory_tier = "64 GiB"
metrics = "[::1]:9476"

[[periodic]]
command = "python *train.py*"
every = "10min"

[[periodic]]
user = "nobody"
every = 60.5
keep = 2

[[limits]]
user = 1000
quota = "1 TiB"
keep = 3
keep_last = false

[[limits]]
quota = 0
keep_each = 2
keep_days = 7
keep_bytes = "1G"
keep_versions = 3

[[files]]
path = "/srv/*/runs"

[[files]]
path = "/home/ann"
user = "nobody"

[[pools]]
name = "chat"
image = "ann/chat"

[[pools]]
name = "asr"
image = "20261129T223012-3fa9"
hollow = 0
ready = 2
max = 2
"""


def test_a_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text(GOOD)
    assert load(path) == Config(
        state_dir=Path("/srv/phos"),
        ring_bytes=256 << 20,
        staging_limit=1 << 30,
        retention_days=7,
        rescan_seconds=1.5,
        shadow_limit=0,
        standby_movers=True,
        allow_unsafe_driver=True,
        max_jobs=3,
        jobs_per_gpu=1,
        min_free=SizeOrShare(share=0.025),
        memory_tier=SizeOrShare(size=64 << 30),
        metrics="[::1]:9476",
        limits=(
            UserLimits(user=1000, quota=1 << 40, keep=3, keep_last=False),
            UserLimits(quota=0, keep_each=2, keep_days=7.0, keep_bytes=10**9, keep_versions=3),
        ),
        files=(
            KeptFile(Path("/srv/*/runs")),
            KeptFile(Path("/home/ann"), user=pwd.getpwnam("nobody").pw_uid),
        ),
        pools=(
            PoolRule("chat", "ann/chat"),
            PoolRule("asr", "20261129T223012-3fa9", hollow=0, ready=2, max=2),
        ),
        periodic=(
            PeriodicRule(every=600.0, command="python *train.py*"),
            PeriodicRule(every=60.5, keep=2, user=pwd.getpwnam("nobody").pw_uid),
        ),
    )


def test_images_are_made_in_memory_unless_phosd_is_on_trial(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    for text, share, byte_count in (
        ("", 0.25, 0),
        ('runtime_dir = "/tmp/run"', 0.0, 0),
        ('runtime_dir = "/tmp/run"\nmemory_tier = "10%"', 0.1, 0),
        ("memory_tier = 0", 0.0, 0),
        ('memory_tier = "1 GiB"', 0.0, 1 << 30),
    ):
        path.write_text(text)
        assert load(path).memory_tier_limit == SizeOrShare(byte_count, share), text


def test_only_the_default_file_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "missing.toml"
    assert load(path, optional=True) == Config()
    done = phosd("--check-config", "--config", str(path))
    assert done.returncode == 1
    assert done.stderr == f"{path}: there is no such file; make it, or name another\n"
    assert phosd("--check-config").returncode == 0


def test_the_usual_state_folder_is_closed_and_another_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, chosen = tmp_path / "usual", tmp_path / "chosen"
    for folder in (usual, chosen):
        folder.mkdir()
        folder.chmod(0o755)
    monkeypatch.setattr(configuration, "STATE_DIR", usual)
    for folder, mode in ((usual, 0o700), (chosen, 0o755), (tmp_path / "new", 0o700)):
        main.prepare_folders(Config(state_dir=folder, runtime_dir=tmp_path / "run"))
        assert folder.stat().st_mode & 0o777 == mode, folder
    (closed,) = (record.message for record in caplog.records)
    assert closed == f"{usual} was open to others and is closed now"
    done = phosd("--session", f"--state-dir={chosen}", f"--runtime-dir={tmp_path / 'run'}")
    assert done.returncode != 0 and f"chmod go= {chosen}`" in done.stderr, done.stderr


def test_every_mistake_is_told_with_file_line_and_key(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text(
        'state_dir = "here"\n\nring_bytes = "much"\nretention_days = true\nspeed = 9\n'
        "rescan_seconds = 0.1\n[listen]\nport = 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    problems = caught.value.problems
    assert [p.split(": ")[:2] for p in problems] == [
        [f"{path}:1", "state_dir"],
        [f"{path}:3", "ring_bytes"],
        [f"{path}:4", "retention_days"],
        [f"{path}:5", "speed"],
        [f"{path}:6", "rescan_seconds"],
        [f"{path}:7", "listen"],
    ]
    assert "not an absolute path" in problems[0]
    assert "there are state_dir, " in problems[3]
    path.write_text("a = \n")
    with pytest.raises(ConfigError, match="line 1"):
        load(path)


def test_mistakes_in_rules_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text(
        '[[periodic]]\nevery = 600\n\n[[periodic]]\nuser = "no such user"\nkeep = 0\n'
        '[[periodic]]\ncommand = ""\nevery = 0.5\nspeed = 1\n[[periodic]]\nuser = true\nevery = 9\n'
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert [problem.removeprefix(f"{path}:") for problem in caught.value.problems] == [
        "1: periodic: say for whom: `user` or `command`",
        '5: periodic.user: "no such user" is not a user, by name or id; write for example "root"',
        "6: periodic.keep: 0 is not a number of images, at least 1; write for example 5",
        '4: periodic.every: is missing; write for example "10min"',
        '8: periodic.command: "" is not a pattern; write for example "python *train.py*"',
        '9: periodic.every: 0.5 is not a duration of at least 1 s; write for example "10min"',
        "10: periodic.speed: is not a setting of this version; there are every, keep, user, "
        "command",
        '12: periodic.user: true is not a user, by name or id; write for example "root"',
    ]
    for text in ("periodic = 5\n", "periodic = [1]\n", "[periodic]\nevery = 9\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"1: periodic: write \[\[periodic\]\] tables"):
            load(path)


JOBS = "a number of jobs from 1 to 64; write for example 16"
DURATION = 'a duration of at least 0.5 s; write for example "10min"'
SIZE = 'a size of at least 1 MiB; write for example "16GiB"'
SHARE = 'a size or a share below 100%; write for example "5%"'
ADDRESS = 'an address and port; write for example "127.0.0.1:9476"'
HUGE = "9" * 400


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("max_jobs = 0", f"0 is not {JOBS}"),
        ("max_jobs = 65", f"65 is not {JOBS}"),
        ("jobs_per_gpu = 1.5", f"1.5 is not {JOBS}"),
        ("retention_days = 0", "0 is not a number of days, at least 1; write for example 90"),
        ("rescan_seconds = nan", f"NaN is not {DURATION}"),
        ('rescan_seconds = "400ms"', f'"400ms" is not {DURATION}'),
        ('rescan_seconds = "soon"', f'"soon" is not {DURATION}'),
        ('ring_bytes = "1000 KiB"', f'"1000 KiB" is not {SIZE}'),
        (f"ring_bytes = {HUGE}", f"{HUGE} is not {SIZE}"),
        ("shadow_limit = -1", '-1 is not a size; write for example "16GiB"'),
        (
            'analysis = "on"',
            "\"on\" is not 'background' or 'off'; write for example \"background\"",
        ),
        ('min_free = "101%"', f'"101%" is not {SHARE}'),
        ('min_free = "x%"', f'"x%" is not {SHARE}'),
        ('memory_tier = "some"', f'"some" is not {SHARE}'),
        ("memory_tier = [5]", f"[5] is not {SHARE}"),
        ("metrics = 9476", f"9476 is not {ADDRESS}"),
        ('metrics = "localhost:9476"', f'"localhost:9476" is not {ADDRESS}'),
        ('metrics = "127.0.0.1:65536"', f'"127.0.0.1:65536" is not {ADDRESS}'),
        (
            'metrics = "0.0.0.0:9476"',
            "0.0.0.0:9476 can be reached by other machines; listen on 127.0.0.1, "
            "or set metrics_public = true",
        ),
        ("metrics_public = 1", "1 is not true or false; write for example true"),
    ],
)
def test_mistakes_in_values(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.problems == [f"{path}:2: {line.split(' ')[0]}: {problem}"]


def test_metrics_for_other_machines_have_to_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text('metrics = "0.0.0.0:9476"\nmetrics_public = true\n')
    assert load(path).metrics == "0.0.0.0:9476"


def test_mistakes_in_limits_of_users_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text(
        '[[limits]]\nuser = "root"\nkeep_last = false\n[[limits]]\nkeep = 0\nquota = "x"\n'
        "[[limits]]\nkeep_days = 0\nkeep_bytes = 1\nkeep_last = 1\nspeed = 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert [problem.removeprefix(f"{path}:") for problem in caught.value.problems] == [
        "1: limits: say what the limits are: `quota` or `keep` or `keep_each` or `keep_days` or "
        "`keep_bytes` or `keep_versions`",
        "5: limits.keep: 0 is not a number of images, at least 1; write for example 5",
        '6: limits.quota: "x" is not a size; write for example "16GiB"',
        "8: limits.keep_days: 0 is not a number of days, at least 0.01; write for example 30",
        f"9: limits.keep_bytes: 1 is not {SIZE}",
        "10: limits.keep_last: 1 is not true or false; write for example true",
        "11: limits.speed: is not a setting of this version; there are user, quota, keep, "
        "keep_each, keep_days, keep_bytes, keep_versions, keep_last",
    ]


def test_mistakes_in_files_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text('[[files]]\nuser = "root"\n[[files]]\npath = "runs"\n')
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert [problem.removeprefix(f"{path}:") for problem in raised.value.problems] == [
        '1: files.path: is missing; write for example "/srv/phos"',
        "1: files: say which: `path`",
        '4: files.path: "runs" is not an absolute path; write for example "/srv/phos"',
    ]


def test_mistakes_in_pools_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    pool = '[[pools]]\nname = "{}"\nimage = "ann/chat"\n'
    path.write_text(
        f"{pool.format('a b')}{pool.format('chat')}hollow = 9\n{pool.format('c')}{pool.format('c')}"
        "[[pools]]\nhollow = 65\n"
    )
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert [problem.removeprefix(f"{path}:") for problem in raised.value.problems] == [
        '2: pools.name: "a b" is not a name of a pool (up to 32 letters, digits, and any of `_ -`, '
        'with a letter or digit first); write for example "chat"',
        "4: pools: more programs are to wait than there may be; raise max",
        "15: pools.hollow: 65 is not a number from 0 to 64; write for example 2",
        '14: pools.name: is missing; write for example "chat"',
        '14: pools.image: is missing; write for example "ann/chat"',
        "14: pools: say which: `name`",
        "1: pools: 2 have the name c; give each another one",
    ]


def test_whose_limits_hold() -> None:
    mine, everybodys = UserLimits(user=7, keep=1), UserLimits(quota=5)
    assert limits_of((mine, everybodys), 7) == mine
    assert limits_of((mine, everybodys), 8) == everybodys
    assert limits_of((everybodys, mine), 7) == everybodys
    assert limits_of((mine,), 8) == NO_LIMITS
    assert (mine.delete, everybodys.delete) == (True, False)


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (PeriodicRule(every=9), True),
        (PeriodicRule(every=9, command="*train.py*"), True),
        (PeriodicRule(every=9, command="train.py"), False),
        (PeriodicRule(every=9, command="python ?rain.py"), True),
        (PeriodicRule(every=9, user=0), True),
        (PeriodicRule(every=9, user=1), False),
        (PeriodicRule(every=9, user=0, command="perl *"), False),
    ],
)
def test_what_a_rule_is_about(rule: PeriodicRule, fits: bool) -> None:
    assert rule.fits(this_process()) is fits


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("2K", 2000), ("2 KiB", 2048), ("1.5G", 1_500_000_000), ("16GiB", 16 << 30)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "1 PiB", "1.5.5", "GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size(text)


def test_check_config_explains_and_exits(tmp_path: Path) -> None:
    path = tmp_path / "phosd.toml"
    path.write_text("ring = 1\n")
    done = phosd("--check-config", "--config", str(path))
    assert done.returncode == 1
    assert f"{path}:1: ring: is not a setting" in done.stderr
    path.write_text(GOOD)
    done = phosd("--check-config", "--config", str(path), "--state-dir", str(tmp_path))
    assert done.returncode == 0
    assert f'state_dir = "{tmp_path}"\n' in done.stdout
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    assert load(again) == msgspec.structs.replace(load(path), state_dir=tmp_path)


def test_the_schema_says_what_the_file_may_have() -> None:
    done = phosd("--config-schema")
    assert done.returncode == 0
    schema = json.loads(done.stdout)
    assert schema == json_schema()
    assert {*schema["properties"]} == {*Config.__struct_fields__}
    described = [*schema["properties"].values()]
    for rules in ("periodic", "limits", "files", "pools"):
        items = schema["properties"][rules]["items"]
        assert items["additionalProperties"] is False
        described += items["properties"].values()
    assert all(each["description"] for each in described)
    assert schema["properties"]["min_free"]["default"] == "1%"
    assert schema["properties"]["max_jobs"].items() >= {"minimum": 1, "maximum": 64}.items()


def test_texts_that_are_read_fit_the_schema() -> None:
    schema = json_schema()["properties"]
    settings = tomllib.loads(GOOD)
    tables = [
        (schema[name]["items"]["properties"], rule)
        for name in ("periodic", "limits", "files", "pools")
        for rule in settings.pop(name)
    ]
    for properties, table in [(schema, settings), *tables]:
        for key, value in table.items():
            if isinstance(value, str):
                assert "string" in properties[key]["type"]
                assert re.search(properties[key].get("pattern", ""), value), key
    for key, text in (("min_free", "101%"), ("rescan_seconds", "soon"), ("ring_bytes", "1 PiB")):
        assert not re.search(schema[key]["pattern"], text), key

"""Print every package that a checkout needs, from ``pyproject.toml``, one a line for pip.

With names of extras print only what these need, as those that ``make test-all`` alone plays.
"""

import sys
import tomllib
from pathlib import Path

ONLY_FOR_ALL = ("test-cri", "test-kubernetes", "test-s3")


def main() -> None:
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    project = settings["project"]
    extras = project["optional-dependencies"]
    if named := sys.argv[1:]:
        print("\n".join(package for name in named for package in extras[name]))
        return
    wanted = [*settings["build-system"]["requires"], *project["dependencies"]]
    for name, extra in extras.items():
        wanted += extra if name not in ONLY_FOR_ALL else []
    print("\n".join(wanted))


if __name__ == "__main__":
    main()

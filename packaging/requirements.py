"""Print every package that a checkout needs, from ``pyproject.toml``, one a line for pip."""

import tomllib
from pathlib import Path


def main() -> None:
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    project = settings["project"]
    wanted = [*settings["build-system"]["requires"], *project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    print("\n".join(wanted))


if __name__ == "__main__":
    main()

"""Write what is made from the sources: references, schemas, what type checkers read of Client, what
works (docs/compatibility.md), and pictures (docs/pictures).

    python packaging/make_pages.py [--check]

With ``--check`` nothing is written, and what would differ is an error.
"""

import runpy
import sys
from pathlib import Path

MAKERS = (
    *("make_dbus", "make_api", "make_client", "make_compatibility"),
    *("make_schemas", "make_pictures"),
)


def main(words: list[str]) -> None:
    for maker in MAKERS:
        made = runpy.run_path(str(Path(__file__).with_name(f"{maker}.py")))["files"]()
        for path, text in made.items():
            if "--check" not in words:
                path.write_text(text, encoding="utf-8")
            elif not path.exists() or path.read_text(encoding="utf-8") != text:
                raise SystemExit(
                    f"{path} is not as its sources; write it: `python packaging/make_pages.py`"
                )


if __name__ == "__main__":
    main(sys.argv[1:])

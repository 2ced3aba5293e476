"""Fetch the descriptions of CRIU's images, ``images/*.proto``, from the source of Debian's package.

``fetch_criu_protos.py FOLDER`` writes them to FOLDER. The source is of the suite that
``install_criu.py`` takes CRIU from, and apt checks its signature.
"""

import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from install_criu import SUITES, PrivateApt, debian_archive


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="criu-source-") as scratch:
        apt = PrivateApt(Path(scratch) / SUITES[0], debian_archive(), SUITES[0], "deb-src")
        apt.update()
        with tarfile.open(apt.source("criu")) as source:
            for member in source:
                name = PurePosixPath(member.name)
                if name.suffix == ".proto" and name.parent.name == "images":
                    content = source.extractfile(member)
                    assert content is not None, name
                    (target / name.name).write_bytes(content.read())


if __name__ == "__main__":
    main()

"""The releases of Debian and Ubuntu that the package is built for: what differs between them."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from install_criu import os_release, version_tuple

# Not from the package of this name: that is what this folder is called, too.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


@dataclass(frozen=True)
class Suite:
    """A release that a package is for: its codename, the fields of its ``os-release``, and its
    versions of Python and of the C library.
    """

    codename: str
    release: Mapping[str, str]
    python: tuple[int, int]
    glibc: tuple[int, ...]

    @property
    def suffix(self) -> str:
        """What tells versions of the package apart, ``~deb12u1`` for Debian 12; nothing where a
        distribution numbers no release, as Debian's testing. That of a newer release is newer for
        dpkg, too, so an upgrade of the system finds an upgrade of phosd.
        """
        if "VERSION_ID" not in self.release:
            return ""
        name = {"debian": "deb"}.get(self.release["ID"], self.release["ID"])
        return f"~{name}{self.release['VERSION_ID']}u1"


OTHERS = {
    each.codename: each
    for each in (
        Suite("bookworm", {"ID": "debian", "VERSION_ID": "12"}, (3, 11), (2, 36)),
        Suite("trixie", {"ID": "debian", "VERSION_ID": "13"}, (3, 13), (2, 41)),
        Suite("noble", {"ID": "ubuntu", "VERSION_ID": "24.04"}, (3, 12), (2, 39)),
    )
}
"""The releases that a package can be built for on another one."""


def own_suite() -> Suite:
    """Return the release of this machine."""
    release = os_release()
    codename = release.get("VERSION_CODENAME", "unstable")
    return Suite(codename, release, sys.version_info[:2], version_tuple(own_glibc()))


def own_glibc() -> str:
    """Return the version of the C library that native code is built with here."""
    return platform.libc_ver()[1]


def require_fit(suite: Suite) -> None:
    """Exit if what was built here would not run on a release."""
    if version_tuple(own_glibc()) > suite.glibc:
        theirs = ".".join(map(str, suite.glibc))
        sys.exit(
            f"the native libraries are built with glibc {own_glibc()}, and {suite.codename} has "
            f"{theirs}; build the package for it on {suite.codename} or on an older release"
        )


def require_complete(folder: Path, python: str) -> None:
    """Exit if a distribution in a folder needs one that is not there. pip fetches for another
    Python what its own would need: it asks that one whether ``python_version >= "3.12"``.
    """
    found = list(distributions(path=[str(folder)]))
    names = {canonicalize_name(each.name) for each in found}
    conditions = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for each in found:
        for needed in map(Requirement, each.requires or ()):
            asked = needed.marker is None or needed.marker.evaluate(conditions)
            if asked and canonicalize_name(needed.name) not in names:
                sys.exit(f"{each.name} needs {needed} with Python {python}: pip has not fetched it")

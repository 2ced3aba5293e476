"""Say how full the disk is that images are on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """Bytes: of the images' disk in all, free on it, that one's images take (for administrators all
    images; with a quota suspended programs count, too), and that they may take (0: as many as the
    disk has).
    """

    total: int
    free: int
    used: int
    quota: int

    @property
    def share(self) -> float:
        """How full the disk is, or the quota if that is fuller: 0..1."""
        disk = 1 - self.free / self.total if self.total else 0.0
        return max(disk, self.used / self.quota if self.quota else 0.0)

"""Say what becomes of a mover that is of another version than this phosd."""

from phosd.errors import Busy, Internal


def require_replaceable(gpu: int, pid: int, *, stays: bool, is_new: bool) -> None:
    """Raise :class:`Busy` if the mover ``stays``, because it keeps device memory, and
    :class:`Internal` if it ``is_new``: then another one would be of that version, too.
    """
    if is_new:
        raise Internal(
            f"the data mover of GPU {gpu} that was just started is of another version than this"
            " phosd, whose files were replaced while it ran",
            hint="restart phosd",
        )
    if stays:
        raise Busy(
            f"the data mover of GPU {gpu} (process {pid}) was started by another phosd,"
            " and keeps device memory of programs",
            hint="`phos recover` brings them back; it ends then, and a new one is started",
        )

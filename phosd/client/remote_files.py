"""Read and write files at a URL that fsspec knows, with errors that say what to do."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from phosd import installation
from phosd.errors import (
    InvalidOption,
    NotAuthorized,
    PhosError,
    Reason,
    RemoteFailed,
    Unsupported,
)

_T = TypeVar("_T")
_PATHS = ("/", "./", "../")
"""How paths begin that cannot be taken for the name of a machine or a bucket."""


class RemoteFiles:
    """The files at a URL, by their paths below it.

    Everything raises :class:`RemoteFailed`, :class:`NotAuthorized` or :class:`InvalidOption` for
    what the other side says.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = _file_system(url)
        self._root = root.rstrip("/")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder and below, by the last part of its path."""
        return {path.rpartition("/")[2]: size for path, size in self._found(folder).items()}

    def _found(self, folder: str) -> dict[str, int]:
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._trouble("listed", error) from error
        return {path: int(told["size"]) for path, told in found.items()}

    def parse(self, name: str, parsed: Callable[[Callable[[int], bytes]], _T]) -> _T | None:
        """Return what ``parsed`` makes of a file; None if there is none.

        It is given a function that reads the next bytes, at most so many: who has written the file
        may have made it larger than memory.
        """
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as file:
                return parsed(file.read)
        except FileNotFoundError:
            return None
        except PhosError:
            raise
        except Exception as error:
            raise self._trouble("read", error) from error

    def read(self, name: str, size: int) -> bytes | None:
        """Return the bytes of a file, as far as ``size`` goes; None if there is none."""
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{name}", start=0, end=size)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._trouble("read", error) from error
        return data

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from ``start`` to ``end``."""
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{name}", start=start, end=end)
        except Exception as error:
            raise self._trouble("read", error) from error
        if len(data) != end - start:
            raise RemoteFailed(f"{name} at {self.url} is cut short", hint="push the image again")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file, in place of the one that is there."""
        path = f"{self._root}/{name}"
        try:
            try:
                self._fs.pipe_file(path, data)
            except FileNotFoundError:  # where there are folders, they must be made
                self._make_folders(name)
                self._fs.pipe_file(path, data)
        except Exception as error:
            raise self._trouble("written", error) from error

    def _make_folders(self, name: str) -> None:
        """Make the folders for a file, and that of the URL; no bucket, whose name may be a slip."""
        below = name.split("/")[:-1]
        paths = ["/".join([self._root, *below[:depth]]) for depth in range(len(below) + 1)]
        for path in paths if "/" in self._root.strip("/") else paths[1:]:
            with suppress(FileExistsError):
                self._fs.mkdir(path, create_parents=False)

    def _trouble(self, what: str, error: Exception) -> PhosError:
        """Return the error for what the file system says."""
        said = str(error) or type(error).__name__
        if isinstance(error, PermissionError):
            return NotAuthorized(
                f"{self.url} cannot be {what}: {said}",
                hint="see whose credentials you ask with (for S3 `aws sts get-caller-identity`), "
                "and what they may do there",
            )
        if isinstance(error, FileNotFoundError):
            return InvalidOption(
                f"{self.url} is not there: {said}",
                hint="make the bucket or the folder, or name another",
            )
        return RemoteFailed(
            f"{self.url} cannot be {what}: {said}",
            hint="mend that and try again; a push goes on where it was",
        )


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    is_path = url.startswith(_PATHS) or (url and Path(url).is_dir())
    if "://" not in url and not is_path:
        raise InvalidOption(
            f"{url!r} is neither a URL nor a folder",
            hint="name a URL such as s3://BUCKET/FOLDER or file:///FOLDER, or a folder that is "
            "there; to another machine leads `phos export IMAGE - | ssh HOST phos import -`",
        )
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        way = installation.how_to_get("remote", packaged="apt install python3-fsspec")
        raise _missing("fsspec", way) from error
    try:
        found: tuple[Any, str] = url_to_fs(url)
    except ImportError as error:  # the message names what it needs
        way = "s3fs for S3, beside fsspec"
        raise _missing(f"what {url.partition(':')[0]} needs ({error})", way) from error
    except (ValueError, OSError) as error:
        raise InvalidOption(
            f"{url} is nothing that images can be kept at: {error}",
            hint="name a URL such as s3://BUCKET/FOLDER or file:///FOLDER",
        ) from error
    return found


def _missing(what: str, way: str) -> Unsupported:
    return Unsupported(
        f"a Python package is missing: {what}",
        hint=f"install it: {way}",
        reason=Reason.MISSING_PACKAGE,
    )

"""Hold the bytes of a module in a memory file that nobody can change any more."""

import fcntl
import hashlib
import mmap
import os
from types import TracebackType
from typing import Self

from phosd.engine.hook_client.code_images import MAX_BYTES, hash_of
from phosd.errors import Unsupported
from phosd.units import human_bytes

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Module:
    """The bytes, behind the descriptor ``file``, with their SHA-256 as ``digest`` and the ``hash``
    that the hook gives them. Leaving the context frees them.
    """

    def __init__(self, file: int) -> None:
        """Take a memory file, and seal it. Raises :class:`Unsupported` if it is empty or too
        large.
        """
        self.file = file
        try:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            self.size = os.fstat(file).st_size
            if not 0 < self.size <= MAX_BYTES:
                raise Unsupported(
                    f"a module of {human_bytes(self.size)} is not analysed",
                    hint=f"those of at most {human_bytes(MAX_BYTES)} are",
                    reason="too-large",
                )
            with mmap.mmap(file, self.size, prot=mmap.PROT_READ) as content:
                self.digest = hashlib.sha256(content).hexdigest()
                self.hash = hash_of(content)
        except BaseException:
            os.close(file)
            raise

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return a module with these bytes."""
        file = memory_file("module")
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(data)
        return cls(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        os.close(self.file)


def memory_file(name: str) -> int:
    """Return the descriptor of a memory file that can be sealed."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

"""Find the files that belong to a program, open or not.

Nothing of them need be open: a checkpoint of a training is written and closed. The owner's worker
walks the folders, with the owner's rights, and keeps the files open that it finds; here they are
reached by its links in ``/proc``, as those of the program are.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from msgspec.structs import replace

from phosd.engine.criu.files.file_worker import SHORT_TIMEOUT, Orders, Worker
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.image.cpu_manifest import DeclaredState
from phosd.engine.program.declared import KEEP_FILES, KeptFiles, declared_patterns
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import procfs
from phosd.engine.system.file_status import LOCAL
from phosd.engine.system.mounts import mount_types
from phosd.errors import Reason, Unsupported


class DeclaredFile(NamedTuple):
    """A file, and a link to it as it was found."""

    path: str
    link: Path


class DeclaredFiles:
    """Those of a program, with what is ``kept`` for its user. Inside the context the worker stands
    by, if there is anything. ``runtime_dir`` has the records of the pid namespaces made by phosd.
    """

    def __init__(self, tree: ProcessTree, kept: KeptFiles, runtime_dir: Path | None) -> None:
        self._owner = Owner.of(tree)
        pids, uid = [process.pid for process in tree.living], self._owner.uid
        self._patterns = declared_patterns(pids, uid, kept, runtime_dir)
        self._own = declared_patterns(pids, uid, (), runtime_dir)
        """What the program itself has declared: that no other one uses, too."""
        self._opened = contextlib.ExitStack()
        self._worker: Worker | None = None
        self.state: DeclaredState | None = None
        """All that was there when :meth:`now` was called last; its patterns are the program's."""

    def __enter__(self) -> Self:
        if self._patterns:
            self._worker = self._opened.enter_context(Worker(self._owner.uid))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def now(self) -> Iterator[DeclaredFile]:
        """Yield the files that there are, on file systems of this machine. The links of an earlier
        call are not valid any more.

        Raises :class:`Timeout` if their file systems do not answer, and :class:`Unsupported`.
        """
        if self._worker is None:
            return
        owner = self._owner
        orders = Orders(owner.uid, owner.gid, owner.groups, mark="", declared=self._patterns)
        answer = self._worker.ask(orders, SHORT_TIMEOUT)
        if answer.problems:
            raise Unsupported(
                f"what the program declared as its files cannot be saved: {answer.problems[0]}",
                hint=f"the program goes on; start it with fewer ({KEEP_FILES}); see [[files]] in "
                "phosd.toml",
                reason=Reason.PROCESS_STATE,
            )
        assert answer.state is not None
        self.state = replace(answer.state, patterns=self._own)
        process, kinds = procfs.PROC / str(self._worker.pid), mount_types(os.getpid())
        for found in answer.found:
            number = str(found.descriptor)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was killed
                mount = int(procfs.fields_of(process / "fdinfo" / number)["mnt_id"])
                if kinds.get(mount) in LOCAL:
                    yield DeclaredFile(found.path, process / "fd" / number)

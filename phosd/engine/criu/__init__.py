"""CRIU: the CPU side of a process tree, dumped and restored."""

from phosd.engine.criu.binary import Criu, Owner
from phosd.engine.criu.dump import Dump, DumpOptions, TreeDump, check, dump_tree
from phosd.engine.criu.made import end, is_criu, is_made
from phosd.engine.criu.pages import PageStore
from phosd.engine.criu.probe import Verdict, probe, require_working
from phosd.engine.criu.restore import (
    Restored,
    RestoreOptions,
    admission,
    check_images,
    close_to_others,
    require_free,
    restore_tree,
    restoring_user,
)
from phosd.engine.owner_files import Policy

__all__ = [
    "Criu",
    "Dump",
    "DumpOptions",
    "Owner",
    "PageStore",
    "Policy",
    "RestoreOptions",
    "Restored",
    "TreeDump",
    "Verdict",
    "admission",
    "check",
    "check_images",
    "close_to_others",
    "dump_tree",
    "end",
    "is_criu",
    "is_made",
    "probe",
    "require_free",
    "require_working",
    "restore_tree",
    "restoring_user",
]

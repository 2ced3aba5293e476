"""CRIU: the CPU side of a process tree, dumped and restored."""

from phosd.engine.criu.binary import Criu, Owner
from phosd.engine.criu.dump import DumpOptions, TreeDump, check, dump_tree

__all__ = ["Criu", "DumpOptions", "Owner", "TreeDump", "check", "dump_tree"]

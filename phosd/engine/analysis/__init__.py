"""Say what each kernel of a module reads and writes, from its machine code.

An image that a program loads (``code.images``) is split into *cubins*, ELF files with machine code
(SASS) for one architecture. nvdisasm decodes a cubin (``code.disassembly``), in a process that can
do little (``code.tools``). Everything here is about bytes that users wrote: they are damaged or
hostile until the contrary is shown, and whatever is not understood is unknown, which counts as read
and written everywhere.
"""

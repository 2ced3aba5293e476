"""Read machine code: modules, cubins, their disassembly, and the tools that make it."""

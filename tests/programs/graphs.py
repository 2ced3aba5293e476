"""A graph that changes the words of a step in one block: a copy into it, a fill, a kernel."""

import ctypes
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import ok
from launching import THREADS, WORD, Field, Kernels, blocks_for, filled, pointers_to

SIZE = 4096
"""Bytes that are copied and filled, at other places than the kernel's words."""


class Graph:
    """A graph and what was instantiated from it, aimed at one block."""

    def __init__(self, kernels: Kernels, field: Field) -> None:
        self._kernels = kernels
        self._field = field
        self._source = filled(SIZE, 3)
        self._graph = ok(driver.cuGraphCreate(0))
        block = field.blocks[0]
        self._copy = ok(
            driver.cuGraphAddMemcpyNode(self._graph, None, 0, self._copied(block), kernels.context)
        )
        self._fill = ok(
            driver.cuGraphAddMemsetNode(
                self._graph, [self._copy], 1, self._filled(block, 0), kernels.context
            )
        )
        node, kept = self._changed(block, 0, 0)
        self._change = ok(driver.cuGraphAddKernelNode(self._graph, [self._fill], 1, node))
        del kept
        self._runnable = ok(driver.cuGraphInstantiate(self._graph, 0))

    def launch(self, stream: Any = 0) -> None:
        """Run it once."""
        ok(driver.cuGraphLaunch(self._runnable, stream))

    def close(self) -> None:
        """Destroy it. Nothing of it may run any more."""
        ok(driver.cuGraphExecDestroy(self._runnable))
        ok(driver.cuGraphDestroy(self._graph))
        ok(driver.cuMemFree(self._source))

    def aim(self, block: int, step: int, seed: int, *, only_pattern: bool = False) -> None:
        """Change the block that it writes; with ``only_pattern`` not what runs, but the graph from
        which others are updated.
        """
        context = self._kernels.context
        copied, filled_ = self._copied(block), self._filled(block, seed & 0xFF)
        changed, kept = self._changed(block, step, seed)
        if only_pattern:
            ok(driver.cuGraphMemcpyNodeSetParams(self._copy, copied))
            ok(driver.cuGraphMemsetNodeSetParams(self._fill, filled_))
            ok(driver.cuGraphKernelNodeSetParams(self._change, changed))
        else:
            run = self._runnable
            ok(driver.cuGraphExecMemcpyNodeSetParams(run, self._copy, copied, context))
            ok(driver.cuGraphExecMemsetNodeSetParams(run, self._fill, filled_, context))
            ok(driver.cuGraphExecKernelNodeSetParams(run, self._change, changed))
        del kept

    def launch_within_another(self) -> None:
        """Run what this graph says now as the child of a graph that is made for it, and wait."""
        outer = ok(driver.cuGraphCreate(0))
        ok(driver.cuGraphAddChildGraphNode(outer, None, 0, self._graph))
        runnable = ok(driver.cuGraphInstantiate(outer, 0))
        ok(driver.cuGraphLaunch(runnable, 0))
        ok(driver.cuCtxSynchronize())
        ok(driver.cuGraphExecDestroy(runnable))
        ok(driver.cuGraphDestroy(outer))

    def become(self, pattern: "Graph") -> None:
        """Run what the other graph says, from now on."""
        ok(driver.cuGraphExecUpdate(self._runnable, pattern._graph))

    def _copied(self, block: int) -> Any:
        copy = driver.CUDA_MEMCPY3D()
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.dstDevice = self._source, block + (1 << 20)
        copy.WidthInBytes, copy.Height, copy.Depth = SIZE, 1, 1
        return copy

    def _filled(self, block: int, value: int) -> Any:
        fill = driver.CUDA_MEMSET_NODE_PARAMS()
        fill.dst, fill.value, fill.elementSize = block + (1 << 20) + SIZE, value, 1
        fill.pitch = fill.width = SIZE
        fill.height = 1
        return fill

    def _changed(self, block: int, step: int, seed: int) -> tuple[Any, Any]:
        """The node's parameters, and what must be kept while they are used."""
        field = self._field
        node = driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = self._kernels.function("touch")
        node.gridDimX, node.gridDimY, node.gridDimZ = blocks_for(field.count), 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = THREADS, 1, 1
        arguments = u64(block + WORD * field.first(step)), *field.shape(), u64(seed)
        pointers = pointers_to(arguments)
        node.kernelParams = ctypes.addressof(pointers)
        return node, (arguments, pointers)

"""What the analysis takes for granted of tensor maps, as ptxas compiles it."""

from __future__ import annotations

from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.code.tools import Tool, run
from tests.native.analysis.oracle import analysed

PTX = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry copy(.param .align 64 .b8 in[128], .param .align 64 .b8 out[128],
                     .param .u64 from, .param .u64 to) {
    .reg .b64 %rd<9>;
    .reg .b32 %r<5>;
    .shared .align 128 .b8 buffer[4096];
    .shared .align 8 .b64 barrier;
    mov.u32 %r1, buffer;
    mov.u32 %r2, barrier;
    mov.u32 %r3, 0;
    mov.b64 %rd1, in;
    cvta.param.u64 %rd2, %rd1;
    mov.b64 %rd3, out;
    cvta.param.u64 %rd4, %rd3;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r1], [%rd2, {%r3, %r3}], [%r2];
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r3, %r3}], [%r1];
    ld.param.u64 %rd5, [from];
    ld.param.u64 %rd6, [to];
    cvta.to.global.u64 %rd7, %rd5;
    cvta.to.global.u64 %rd8, %rd6;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd7], 1024, [%r2];
    cp.async.bulk.global.shared::cta.bulk_group [%rd8], [%r1], 2048;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r3, [%r2];
    ret;
}
.visible .entry replace(.param .u64 map, .param .u64 address) {
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [map];
    ld.param.u64 %rd2, [address];
    cvta.to.global.u64 %rd3, %rd1;
    tensormap.replace.tile.global_address.global.b1024.b64 [%rd3], %rd2;
    ret;
}
"""


def test_tensor_maps_and_bulk_copies() -> None:
    found = analysed(run(Tool.PTXAS, ["--gpu-name", "sm_90a"], PTX.encode()))
    offsets = [parameter.offset for parameter in found["copy"].kernel.parameters]
    uses = (Use.READ, Use.WRITTEN, Use.READ, Use.WRITTEN)
    assert found["copy"].roles == dict(zip(offsets, uses, strict=True))
    assert [access.size for access, _ in found["copy"].accesses][2:] == [1024, 2048]
    # The address of the tensor is in the first 8 bytes.
    ((store, came),) = found["replace"].accesses
    assert (set(came.parameters), store.size) == ({0}, 8)
    assert store.address.without_constant()[1] == 0

// Lets the GPU driver's restore threads run while CRIU holds all other threads of a tree.
//
// The driver does the work of its checkpoint and restore in one thread of the process itself. Every
// other thread must stand still meanwhile: calls that only ask are answered from memory that the
// driver takes away (docs/design/hazards.md, 38). A thread has one tracer, which is CRIU; so CRIU
// lets the restore threads run, and phosd calls the driver.
//
// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
#pragma once

namespace phos::criu {

// Connects to phosd, if it wants to be asked: PHOS_DRIVER_PEER is the descriptor of a socket, and
// PHOS_DRIVER_SECONDS how long phosd may take in all.
void connect();

// Lets phosd have the driver checkpoint the tree's processes: all at the first call. Returns -1 if
// CRIU is to give up.
int checkpoint_devices(int pid);

// Lets phosd have the driver restore them, at the end of a dump, or late in a restore: all at the
// first call. `well`: whether CRIU had no error.
void resume_devices(bool well);

}  // namespace phos::criu

// Legacy CUDA IPC between hooked processes, over descriptors of the memory.
#pragma once

namespace phos::ipc {

// For the hook's thread: where peers ask for memory (-1 while nobody may), and one such request.
int listener();
void serve();

void detach();  // closes the listener, for a dump
void attach();  // opens it again if it was open

}  // namespace phos::ipc

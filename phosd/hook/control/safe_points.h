// The program's own say in its checkpoints (phosd/include/phos.h): safe points, at which it wants
// to be stopped, and checkpoints that it asks for. Its threads wait here in calls of the exported
// functions; everything else is called on the hook's thread.
#pragma once

#include <string>

#include "protocol/wire.h"

namespace phos::safe_points {

wire::ProgramState state();
// A client waits for a safe point from now on, until client_lost() or the next stop has ended.
void want(int client);
void client_lost(int client);
// Has the threads at a safe point go on to the next one: others may wait for what they do there.
void pass();
// Tells the threads that wait for a checkpoint what has come of it.
void answer(const wire::ProgramAsk& told);

void stopped();  // the process has been parked
// Keeps threads from opening a socket to phosd until awake(): CRIU must meet none. False if one
// does not close it in time.
bool detach();
void awake();
void gate_opened();
void tidy();  // once in a while

}  // namespace phos::safe_points

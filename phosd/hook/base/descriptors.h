// Descriptors that the hook keeps in the program's table: counted, close-on-exec, and closed in a
// forked child, where they would keep sockets and memory alive. A program that becomes a daemon
// closes all descriptors, also those it does not know, and a number may be a file of its own then.
#pragma once

namespace phos::descriptors {

int keep(int descriptor);      // returns it
void release(int descriptor);  // closes it, if it is still ours
bool is_ours(int descriptor);  // false for a socket or a pipe once the program has closed it
unsigned count();
void close_all_in_child();  // no locks, no memory: only this table

}  // namespace phos::descriptors

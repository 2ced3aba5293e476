// Descriptors that the hook keeps in the program's table: counted, close-on-exec, and closed in a
// forked child, where they would keep sockets and memory alive.
#pragma once

namespace phos::descriptors {

int keep(int descriptor);      // returns it
void release(int descriptor);  // closes it
void forget(int descriptor);   // the program has closed it: the number may be another file's soon
unsigned count();
void close_all_in_child();  // no locks, no memory: only this table

}  // namespace phos::descriptors

// Keep the hook's descriptors in the program's table: counted, close-on-exec, and closed in a
// forked child, where they would keep sockets and memory alive. A program that becomes a daemon
// closes all descriptors, including unknown ones, so a number may later be the program's file.
#pragma once

namespace phos::descriptors {

int keep(int descriptor);  // returns the descriptor
// As keep(), for a descriptor that was just made as a socket or a pipe. If the program has closed
// it since and another file has its number, it counts as closed.
int keep_socket(int descriptor);
void release(int descriptor);  // closes the descriptor, if it is still ours
bool is_ours(int descriptor);  // false for a socket or a pipe once the program has closed it
unsigned count();
void close_all_in_child();  // uses no locks and no memory but this table

}  // namespace phos::descriptors

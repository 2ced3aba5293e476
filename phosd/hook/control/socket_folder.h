// Find the folder in which the hook listens: that of the program's user, which phosd makes. Used
// only by the hook's thread.
#pragma once

#include <string>

namespace phos::socket_folder {

// Sets the folder of users' folders.
void look_in(std::string hooks);

// Finds the folder of the user, who may have changed. False if phosd has not made it yet; then that
// of before stays.
bool find();

// The path of this process's file with this suffix: `.sock`, or `.wake`.
std::string path_of(const char* suffix);

// Whether the socket of this process is not there any more.
bool lacks_socket();

// Whether phosd wants a hook that has closed its sockets to come back.
bool woken();

}  // namespace phos::socket_folder

// Unix sockets in a folder that any user can write to, and messages with descriptors.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "protocol/wire.h"

namespace phos::channel {

struct Message {
    wire::Header header{};
    std::vector<unsigned char> payload;
    std::vector<int> descriptors;  // in the table of descriptors; the receiver releases them
};

// All of these return -1 or false on failure, with errno set.
int listen_at(const std::string& path);                     // mode 0600
int listen_abstract(const std::string& name);               // no file; in the network namespace
int connect_abstract(const std::string& name, pid_t peer);  // only to that process
int accept_from(int listener, pid_t* peer);                 // accepts root and our own user only
void stop_listening(int listener);                          // with those in its queue
bool overrun();                              // others have had too many connections stay open here
void refuse_descriptors(int socket);         // before it connects; older kernels pass them always
bool receive(int socket, Message* message);  // false: lost, late, or protocol violated
bool send(int socket, const wire::Header& header, const void* payload,
          const std::vector<int>& descriptors);

}  // namespace phos::channel

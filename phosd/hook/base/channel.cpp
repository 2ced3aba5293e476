#include "base/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/descriptors.h"

namespace phos::channel {
namespace {

constexpr int kPatience = 2000;  // milliseconds, for the next part of a message
constexpr int kPassRights = 83;  // SO_PASSRIGHTS of Linux 6.16
constexpr int kMostHeld = 16;    // connections that cannot be closed

std::atomic<int> held{0};

// The program may close one of the hook's descriptors, and open another file at its number, at any
// moment: also between a look at it and the next call. So no call here waits, which nobody could
// end on the program's file, and nothing is taken from a socket before it is a message.

// Waits until the socket can be used again. False if it took too long or the socket is not ours.
bool wait_for(int socket, short event) {
    pollfd one{socket, event, 0};
    int ready;
    do ready = poll(&one, 1, kPatience);
    while (ready < 0 && errno == EINTR);
    return ready > 0 && descriptors::is_ours(socket);
}

bool is_passing() {
    return errno == EINTR || errno == EAGAIN;
}

bool read_all(int socket, void* buffer, size_t size) {
    auto* at = static_cast<unsigned char*>(buffer);
    while (size) {
        if (!wait_for(socket, POLLIN)) return false;
        const ssize_t got = recv(socket, at, size, MSG_DONTWAIT);
        if (got < 0 && is_passing()) continue;
        if (got <= 0) return false;
        at += got;
        size -= static_cast<size_t>(got);
    }
    return true;
}

// A client sends a header at once, so that its first bytes are there together.
bool a_message_begins(int socket) {
    uint32_t magic = 0;
    ssize_t got = -1;
    do {
        if (!wait_for(socket, POLLIN)) return false;
        got = recv(socket, &magic, sizeof magic, MSG_PEEK | MSG_DONTWAIT);
    } while (got < 0 && is_passing());
    return got == sizeof magic && magic == wire::kMagic;
}

// Reads the first part of a message, to which its descriptors are attached.
ssize_t read_with_descriptors(int socket, void* buffer, size_t size, std::vector<int>* received) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * wire::kMaxDescriptors)];
    iovec part{buffer, size};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t got;
    do got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got <= 0) return got;
    for (cmsghdr* part_header = CMSG_FIRSTHDR(&message); part_header;
         part_header = CMSG_NXTHDR(&message, part_header)) {
        if (part_header->cmsg_level != SOL_SOCKET || part_header->cmsg_type != SCM_RIGHTS) continue;
        const size_t count = (part_header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; ++i) {
            int descriptor;
            std::memcpy(&descriptor, CMSG_DATA(part_header) + i * sizeof(int), sizeof descriptor);
            received->push_back(descriptors::keep(descriptor));
        }
    }
    return message.msg_flags & MSG_CTRUNC ? -1 : got;
}

// Has a socket, and all connections that it accepts, take descriptors or not. An older kernel
// passes them always.
void pass_descriptors(int socket, int wanted) {
    setsockopt(socket, SOL_SOCKET, kPassRights, &wanted, sizeof wanted);
}

bool takes_descriptors(int socket) {
    int wanted = 1;
    socklen_t size = sizeof wanted;
    return getsockopt(socket, SOL_SOCKET, kPassRights, &wanted, &size) != 0 || wanted;
}

// Whether descriptors lie in a connection, which ends. To look drops no last one.
bool holds_descriptors(int socket) {
    shutdown(socket, SHUT_RDWR);  // nothing comes any more
    for (;;) {
        char data[4096];
        iovec part{data, sizeof data};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        const ssize_t found = recvmsg(socket, &message, MSG_PEEK | MSG_DONTWAIT);
        if (found <= 0) return false;
        if (message.msg_flags & MSG_CTRUNC) return true;
        recv(socket, data, static_cast<size_t>(found), MSG_DONTWAIT);
    }
}

// Closes a connection with somebody else. To close a file that they have sent may take years (a TCP
// socket with SO_LINGER), so a connection in which one lies stays open.
void turn_away(int socket) {
    if (takes_descriptors(socket) && holds_descriptors(socket))
        ++held;
    else
        descriptors::release(socket);
}

int unix_socket(int flags) {
    return descriptors::keep_socket(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
}

// Gives up a socket. Keeps the error of the call that failed.
int give_up(int socket) {
    const int error = errno;
    descriptors::release(socket);
    errno = error;
    return -1;
}

socklen_t abstract_address(const std::string& name, sockaddr_un* address) {
    *address = {};
    address->sun_family = AF_UNIX;
    const size_t length = std::min(name.size(), sizeof address->sun_path - 1);
    std::memcpy(address->sun_path + 1, name.data(), length);
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

}  // namespace

int listen_abstract(const std::string& name) {
    sockaddr_un address;
    const socklen_t size = abstract_address(name, &address);
    const int listener = unix_socket(SOCK_NONBLOCK);
    if (listener < 0) return -1;
    pass_descriptors(listener, 0);
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener, 8) != 0)
        return give_up(listener);
    return listener;
}

int connect_abstract(const std::string& name, pid_t peer) {
    sockaddr_un address;
    const socklen_t size = abstract_address(name, &address);
    const int connection = unix_socket(0);
    if (connection < 0) return -1;
    pass_descriptors(connection, 0);  // until it is known who listens
    ucred who{};
    socklen_t length = sizeof who;
    if (connect(connection, reinterpret_cast<sockaddr*>(&address), size) != 0)
        return give_up(connection);
    if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.pid != peer) {
        turn_away(connection);
        errno = EACCES;
        return -1;
    }
    pass_descriptors(connection, 1);
    return connection;
}

int listen_at(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    std::memcpy(address.sun_path, path.data(), path.size());
    const int listener = unix_socket(SOCK_NONBLOCK);
    if (listener < 0) return -1;
    // Remove a socket left by an earlier process with this pid. Another user's cannot be removed
    // from a sticky folder, and bind then fails; no client is fooled, since clients check the peer.
    unlink(path.c_str());
    // The file's mode is taken from the socket, so that the program's umask stays untouched.
    if (fchmod(listener, 0600) != 0 ||
        bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
        listen(listener, 8) != 0)
        return give_up(listener);
    return listener;
}

void stop_listening(int listener) {
    if (descriptors::is_ours(listener) && takes_descriptors(listener)) {
        shutdown(listener, SHUT_RDWR);  // nobody connects any more
        for (int left = 0; left >= 0;) {
            left = descriptors::keep_socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
            if (left >= 0) turn_away(left);
        }
    }
    descriptors::release(listener);
}

bool overrun() {
    return held >= kMostHeld;
}

void refuse_descriptors(int socket) {
    pass_descriptors(socket, 0);
}

int accept_from(int listener, pid_t* peer) {
    const int socket = descriptors::keep_socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (socket < 0) return -1;
    ucred who{};
    socklen_t size = sizeof who;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 ||
        (who.uid != 0 && who.uid != geteuid())) {
        turn_away(socket);
        errno = EACCES;
        return -1;
    }
    if (peer) *peer = who.pid;
    return socket;
}

bool receive(int socket, Message* message) {
    wire::Header& header = message->header;
    if (!a_message_begins(socket)) return false;
    const ssize_t got =
        read_with_descriptors(socket, &header, sizeof header, &message->descriptors);
    if (got <= 0 || !read_all(socket, reinterpret_cast<char*>(&header) + got,
                              sizeof header - static_cast<size_t>(got)))
        return false;
    if (header.magic != wire::kMagic || header.version != wire::kVersion ||
        header.length > wire::kMaxPayload || header.descriptors != message->descriptors.size())
        return false;
    message->payload.resize(header.length);
    return read_all(socket, message->payload.data(), header.length);
}

bool send(int socket, const wire::Header& header, const void* payload,
          const std::vector<int>& carried) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * wire::kMaxDescriptors)] = {};
    iovec parts[2] = {{const_cast<wire::Header*>(&header), sizeof header},
                      {const_cast<void*>(payload), header.length}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (!carried.empty()) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * carried.size());
        cmsghdr* part = CMSG_FIRSTHDR(&message);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof(int) * carried.size());
        std::memcpy(CMSG_DATA(part), carried.data(), sizeof(int) * carried.size());
    }
    size_t left = sizeof header + header.length;
    while (left) {
        if (!wait_for(socket, POLLOUT)) return false;
        const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && is_passing()) continue;
        if (sent <= 0) return false;
        left -= static_cast<size_t>(sent);
        message.msg_control = nullptr;
        message.msg_controllen = 0;
        size_t done = static_cast<size_t>(sent);
        for (iovec& part : parts) {
            const size_t taken = done < part.iov_len ? done : part.iov_len;
            part.iov_base = static_cast<char*>(part.iov_base) + taken;
            part.iov_len -= taken;
            done -= taken;
        }
    }
    return true;
}

}  // namespace phos::channel

#include "control/phosd_socket.h"

#include <phos.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/channel.h"
#include "base/descriptors.h"
#include "base/process.h"

namespace phos::phosd_socket {
namespace {

constexpr uint64_t kPatience = 2'000'000'000;  // for phosd to take a connection

char path_of_socket[sizeof sockaddr_un{}.sun_path];  // written once
std::atomic<const char*> socket_path{""};            // empty before the start

bool look_at_socket(Daemon* found) {
    struct stat info{};
    if (lstat(socket_path.load(), &info) != 0 || !S_ISSOCK(info.st_mode) ||
        (info.st_uid != 0 && info.st_uid != geteuid()))
        return false;
    *found = {info.st_dev, info.st_ino, info.st_ctim, 0};
    return true;
}

// Connects to phosd. Returns -1 if nobody is there. Does not wait for a phosd that stands still,
// nor longer than `patience` for one that is busy.
int connect_to(Daemon* found, uint64_t patience) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (!look_at_socket(found)) return -1;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path.load());
    const int connection =
        descriptors::keep_socket(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (connection < 0) return -1;
    channel::refuse_descriptors(connection);
    const uint64_t until = monotonic_ns() + patience;
    ucred who{};
    socklen_t size = sizeof who;
    while (connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
        const bool full = errno == EAGAIN || errno == EINTR;  // its queue of connections
        if (!full || monotonic_ns() > until || !descriptors::is_ours(connection)) {
            descriptors::release(connection);
            return -1;
        }
        pause_for(10'000'000);
    }
    if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 ||
        (who.uid != 0 && who.uid != geteuid())) {
        descriptors::release(connection);
        return -1;
    }
    found->pid = who.pid;
    return connection;
}

}  // namespace

void look_in(const std::string& runtime_folder) {
    const std::string path = runtime_folder + "/program.sock";
    if (path.size() >= sizeof path_of_socket) return;  // phosd cannot listen there either
    std::memcpy(path_of_socket, path.c_str(), path.size() + 1);
    socket_path = path_of_socket;
}

bool call() {
    Daemon found{};
    const int connection = connect_to(&found, 0);
    if (connection < 0) return false;
    descriptors::release(connection);
    return true;
}

int tell(uint64_t number, uint32_t then, const char* name, Daemon* found, char* why, size_t size) {
    const int connection = connect_to(found, kPatience);
    if (connection < 0) return PHOS_NOTHING;
    struct {
        wire::ProgramWish wish;
        char name[PHOS_NAME_BYTES];
    } said{{number, then, static_cast<uint32_t>(std::strlen(name))}, {}};
    std::memcpy(said.name, name, said.wish.name_size);
    const wire::Header header{wire::kMagic,
                              wire::kVersion,
                              static_cast<uint16_t>(wire::Type::program),
                              1,
                              0,
                              static_cast<uint32_t>(sizeof said.wish) + said.wish.name_size,
                              0};
    channel::Message reply;
    int outcome = PHOS_FAILED;
    std::snprintf(why, size, "Timeout: phosd does not answer at %s", socket_path.load());
    if (channel::send(connection, header, &said, {}) && channel::receive(connection, &reply)) {
        if (reply.header.status == static_cast<uint32_t>(wire::Status::ok))
            outcome = PHOS_WAITING;
        else
            std::snprintf(why, size, "%.*s", static_cast<int>(reply.payload.size()),
                          reinterpret_cast<const char*>(reply.payload.data()));
    }
    for (const int descriptor : reply.descriptors) descriptors::release(descriptor);
    descriptors::release(connection);
    return outcome;
}

bool is_gone(const Daemon& known) {
    Daemon now{};
    if (!look_at_socket(&now)) return true;
    const bool same = now.device == known.device && now.inode == known.inode &&
                      now.changed.tv_sec == known.changed.tv_sec &&
                      now.changed.tv_nsec == known.changed.tv_nsec;
    return !same || (known.pid > 0 && kill(known.pid, 0) != 0 && errno == ESRCH);
}

}  // namespace phos::phosd_socket

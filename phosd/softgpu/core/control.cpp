#include "core/control.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/checkpoint.h"
#include "core/descriptor.h"
#include "core/error.h"
#include "core/registry.h"

namespace phos::softgpu {
namespace {

int g_listener = -1;
std::atomic<int> g_connection{-1};  // the one that is served
constexpr char kThread[] = "phos-control";

socklen_t address_of(const std::string& name, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());  // abstract: begins with a zero
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool transfer(int fd, void* data, size_t size, bool sending) {
    auto* at = static_cast<char*>(data);
    while (size > 0) {
        const ssize_t moved = sending ? send(fd, at, size, MSG_NOSIGNAL) : recv(fd, at, size, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return false;
        at += moved;
        size -= static_cast<size_t>(moved);
    }
    return true;
}

ucred peer_of(int fd) {
    ucred peer{};
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) peer.pid = -1;
    return peer;
}

void serve(int connection) {
    const ucred peer = peer_of(connection);
    // A user namespace may not know root, who is outside of this pid namespace then, too.
    const bool outside = peer.pid == 0;
    if (peer.pid < 0 || (!outside && peer.uid != 0 && peer.uid != geteuid())) return;
    // A peer that connects and stays silent must not hold up the others.
    const timeval patience{10, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ControlRequest request;
    if (!transfer(connection, &request, sizeof request, false)) return;
    ControlReply reply{CUDA_SUCCESS, 0};
    try {
        reply = Checkpoint::instance().handle(request);
    } catch (const Error& error) {
        reply.result = error.code;
    }
    transfer(connection, &reply, sizeof reply, true);
    // A child that was forked meanwhile has the connection, too: closing it would not end it.
    shutdown(connection, SHUT_RDWR);
}

// docs/design/driver.md: others-have-no-state
void require_process(int pid) {
    const bool exists = pid > 0 && (kill(pid, 0) == 0 || errno != ESRCH);
    require(exists, CUDA_ERROR_OPERATING_SYSTEM);
}

// The connection is shut down a moment before it is closed. A tracer that holds the thread in
// between would have a dump meet it.
void await_listening(int pid, int thread) {
    const std::string path =
        "/proc/" + std::to_string(pid) + "/task/" + std::to_string(thread) + "/syscall";
    for (int looks = 0; looks < 1000; ++looks) {
        std::ifstream file(path);
        std::string number;
        // "running" is a thread in no call. A process that may not look gets no dump either.
        if (!(file >> number) || number == std::to_string(SYS_accept4)) return;
        usleep(1000);
    }
}

// The pid that a process has for itself, which may be in a pid namespace of its own; 0 if it has
// ended.
int own_pid_of(int pid) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    for (std::string line; std::getline(status, line);)
        if (line.rfind("NSpid:", 0) == 0)
            return std::atoi(line.c_str() + line.find_last_of("\t ") + 1);
    return 0;
}

// Whether the process has this socket open, as far as one may look.
bool may_have(int pid, const ControlSocket& wanted) {
    const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
    const std::unique_ptr<DIR, int (*)(DIR*)> opened(opendir(folder.c_str()), closedir);
    if (!opened) return true;
    while (const dirent* entry = readdir(opened.get())) {
        char target[64];
        const ssize_t length =
            readlinkat(dirfd(opened.get()), entry->d_name, target, sizeof target);
        if (length > 0 &&
            std::string(target, static_cast<size_t>(length)) == "socket:[" + wanted.inode + "]")
            return true;
    }
    return false;
}

// Anybody may bind a name; only the process itself is believed. Copies of a process, in pid
// namespaces of their own, have names that begin alike. A connection to one that is just being
// dumped would fail its dump.
Descriptor connect_to(int pid) {
    const std::string beginning = "phos-softgpu-" + std::to_string(own_pid_of(pid)) + "-";
    const std::vector<ControlSocket> found = control_sockets(beginning);
    for (const ControlSocket& each : found) {
        const std::string& name = each.name;
        if (found.size() > 1 && !may_have(pid, each)) continue;
        Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        require(bool(connection), CUDA_ERROR_OPERATING_SYSTEM);
        sockaddr_un address;
        if (name.size() >= sizeof address.sun_path) continue;
        const socklen_t size = address_of(name, address);
        if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 &&
            peer_of(connection.get()).pid == pid)
            return connection;
    }
    return {};
}

void listen_forever() {
    while (true) {
        const Descriptor connection(accept4(g_listener, nullptr, nullptr, SOCK_CLOEXEC));
        if (connection) {
            g_connection = connection.get();
            serve(connection.get());
            g_connection = -1;
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
            usleep(10'000);
        }
    }
}

}  // namespace

void start_control() {
    Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    require(bool(listener), CUDA_ERROR_OPERATING_SYSTEM);
    sockaddr_un address;
    const std::string name = control_name(getpid(), own_token());
    const socklen_t size = address_of(name, address);
    if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener.get(), 16) != 0) {
        explain("cannot listen on the abstract socket " + name + ": " + std::strerror(errno) +
                "; is another process squatting on the name?");
        fail(CUDA_ERROR_OPERATING_SYSTEM);
    }
    static Descriptor& kept = *new Descriptor(listener.out_of_the_way());
    g_listener = kept.get();
    std::thread thread(listen_forever);
    pthread_setname_np(thread.native_handle(), kThread);  // by which thread_of() knows it
    thread.detach();
}

void close_control_in_child() {
    if (g_listener >= 0) close(g_listener);
    g_listener = -1;
    forget_own_token();
    if (const int connection = g_connection.exchange(-1); connection >= 0) close(connection);
}

void follow_control_name() {
    sockaddr_un address{};
    socklen_t size = sizeof address;
    require(getsockname(g_listener, reinterpret_cast<sockaddr*>(&address), &size) == 0,
            CUDA_ERROR_OPERATING_SYSTEM);
    const std::string name(reinterpret_cast<const char*>(&address), size);
    take_own_token(std::strtoull(name.substr(name.rfind('-') + 1).c_str(), nullptr, 16));
}

int thread_of(int pid) {
    require_process(pid);
    const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(tasks.c_str()), closedir);
    require(folder != nullptr, CUDA_ERROR_OPERATING_SYSTEM);
    while (const dirent* entry = readdir(folder.get())) {
        std::ifstream file(tasks + "/" + entry->d_name + "/comm");
        std::string name;
        if (std::getline(file, name) && name == kThread) return std::atoi(entry->d_name);
    }
    fail(CUDA_ERROR_NOT_INITIALIZED);
}

ControlReply ask(int pid, const ControlRequest& request) {
    const int thread = thread_of(pid);
    const Descriptor connection = connect_to(pid);
    require(bool(connection), CUDA_ERROR_NOT_INITIALIZED);
    ControlRequest sent = request;
    ControlReply reply{};
    transfer(connection.get(), &sent, sizeof sent, true);
    require(transfer(connection.get(), &reply, sizeof reply, false), CUDA_ERROR_NOT_PERMITTED);
    // The process closes its end after the reply: wait, so that a dump does not meet it.
    char end;
    while (recv(connection.get(), &end, 1, 0) < 0 && errno == EINTR) continue;
    await_listening(pid, thread);
    return reply;
}

}  // namespace phos::softgpu

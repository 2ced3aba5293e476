// The talk with phosd (phosd/engine/criu/run/tracers.py) has two turns: `c` for the driver's
// checkpoint, `r` for its restore. Each message begins with its turn:
//
//   c ready       all threads are held           r ready, r failed   so they are, and CRIU's result
//   c run P:T ..  let thread T of process P run  r run ..
//   c runs        they run                       r runs
//   c hold        the driver is done             r hold
//   c give-up     CRIU is to give up
//
// Nothing here waits for phosd longer than it lives, nor longer than PHOS_DRIVER_SECONDS: CRIU goes
// on then, so that the program does.
//
// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
#include "restore_threads.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace phos::criu {
namespace {

constexpr int kLookMilliseconds = 10;
constexpr size_t kLongest = 1 << 16;  // bytes of a message
constexpr uint64_t kAllSignals = ~uint64_t{0};

struct Thread {
    int process;
    int id;
    uint64_t mask;  // of signals, as it was
};

int g_peer = -1;
time_t g_until = 0;
std::vector<Thread> g_running;
std::vector<int> g_stopped;  // processes that were sent SIGSTOP meanwhile
bool g_checkpointed = false;
bool g_resumed = false;

time_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

void disconnect() {
    if (g_peer >= 0) close(g_peer);
    g_peer = -1;
}

long trace(int request, int thread, uintptr_t address = 0, uintptr_t data = 0) {
    return ptrace(static_cast<__ptrace_request>(request), thread, address, data);
}

bool has_filters(int thread) {
    const std::string path = "/proc/" + std::to_string(thread) + "/status";
    FILE* file = fopen(path.c_str(), "re");
    if (!file) return false;
    char line[256];
    int mode = 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "Seccomp: %d", &mode) == 1) break;
    fclose(file);
    return mode != 0;
}

// Blocks its signals, of which none may run the program's code, and has its seccomp filters count
// again, which CRIU suspends for its own code.
bool let_run(Thread& thread) {
    if (trace(PTRACE_GETSIGMASK, thread.id, sizeof thread.mask,
              reinterpret_cast<uintptr_t>(&thread.mask)) != 0)
        return false;
    uint64_t all = kAllSignals;
    return trace(PTRACE_SETSIGMASK, thread.id, sizeof all, reinterpret_cast<uintptr_t>(&all)) ==
               0 &&
           trace(PTRACE_SETOPTIONS, thread.id) == 0 && trace(PTRACE_CONT, thread.id) == 0;
}

// Continues a thread that has stopped by itself. Only SIGSTOP, which none can block, and faults of
// its own stop it. It gets the latter; the process gets the former when CRIU is done, whose own
// code in it must not be stopped either.
void proceed(const Thread& thread, int status) {
    int signal = status >> 16 ? 0 : WSTOPSIG(status);
    if (signal == SIGSTOP) {
        g_stopped.push_back(thread.process);
        signal = 0;
    }
    trace(PTRACE_CONT, thread.id, 0, static_cast<uintptr_t>(signal));
}

void keep_going() {
    for (const Thread& thread : g_running) {
        int status = 0;
        if (waitpid(thread.id, &status, WNOHANG | __WALL) == thread.id && WIFSTOPPED(status))
            proceed(thread, status);
    }
}

bool hold(const Thread& thread) {
    if (trace(PTRACE_INTERRUPT, thread.id) != 0) return false;
    while (true) {
        int status = 0;
        const pid_t found = waitpid(thread.id, &status, __WALL);
        if (found < 0 && errno == EINTR) continue;
        if (found != thread.id || !WIFSTOPPED(status)) return false;  // it has ended
        if (status >> 16 == PTRACE_EVENT_STOP) break;
        proceed(thread, status);
    }
    uintptr_t options = PTRACE_O_TRACESYSGOOD;  // as CRIU had them
    if (has_filters(thread.id)) options |= PTRACE_O_SUSPEND_SECCOMP;
    return trace(PTRACE_SETOPTIONS, thread.id, 0, options) == 0 &&
           trace(PTRACE_SETSIGMASK, thread.id, sizeof thread.mask,
                 reinterpret_cast<uintptr_t>(&thread.mask)) == 0;
}

bool hold_all() {
    bool all = true;
    for (const Thread& thread : g_running) all &= hold(thread);
    g_running.clear();
    return all;
}

void say(char turn, const char* word) {
    const std::string text = std::string(1, turn) + ' ' + word;
    if (g_peer >= 0 && send(g_peer, text.data(), text.size(), MSG_NOSIGNAL) < 0) disconnect();
}

// What phosd says in this turn; what is left of the turn before does not count. Empty: phosd is
// gone, or has taken too long.
std::string hear(char turn) {
    static char text[kLongest];
    while (g_peer >= 0 && now() <= g_until) {
        pollfd one{g_peer, POLLIN, 0};
        const int readable = poll(&one, 1, kLookMilliseconds);
        keep_going();
        if (readable <= 0) continue;
        const ssize_t size = recv(g_peer, text, sizeof text, MSG_DONTWAIT);
        if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (size <= 0) break;
        if (size > 2 && text[0] == turn && text[1] == ' ')
            return std::string(text + 2, static_cast<size_t>(size) - 2);
    }
    disconnect();
    return {};
}

// Lets threads run: `list` is of processes and threads, as in " 12:13 20:24". With `all`, each of
// them or none.
bool let_run_all(const char* list, bool all) {
    while (*list) {
        char* rest = nullptr;
        Thread thread{};
        thread.process = static_cast<int>(strtol(list, &rest, 10));
        if (*rest != ':') return false;
        thread.id = static_cast<int>(strtol(rest + 1, &rest, 10));
        list = rest;
        if (let_run(thread))
            g_running.push_back(thread);
        else if (all)
            return false;
    }
    return true;
}

// Returns whether phosd says that the driver has done its work, and the threads are held again.
bool turn(char name, const char* began, bool all) {
    if (g_peer < 0) return false;
    say(name, began);
    const std::string answer = hear(name);
    constexpr char kRun[] = "run";
    constexpr size_t length = sizeof kRun - 1;
    if (answer.compare(0, length, kRun) != 0) return false;
    if (!let_run_all(answer.c_str() + length, all)) {
        hold_all();
        say(name, "failed");
        return false;
    }
    say(name, "runs");
    const bool done = hear(name) == "hold";
    return hold_all() && done;
}

}  // namespace

void connect() {
    const char* peer = std::getenv("PHOS_DRIVER_PEER");
    const char* seconds = std::getenv("PHOS_DRIVER_SECONDS");
    if (!peer || !seconds) return;
    g_peer = std::atoi(peer);
    g_until = now() + std::atoi(seconds);
    fcntl(g_peer, F_SETFD, FD_CLOEXEC);  // phosd is to see when CRIU ends, whatever CRIU started
}

int checkpoint_devices(int) {
    if (g_checkpointed || g_peer < 0) return g_checkpointed ? 0 : -ENOTSUP;
    g_checkpointed = turn('c', "ready", true);
    return g_checkpointed ? 0 : -1;
}

void resume_devices(bool well) {
    if (g_resumed) return;
    g_resumed = true;
    turn('r', well ? "ready" : "failed", false);
    for (const int process : g_stopped) kill(process, SIGSTOP);
}

}  // namespace phos::criu

#include "control/safe_points.h"

#include <linux/futex.h>
#include <phos.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/channel.h"
#include "base/descriptors.h"
#include "base/process.h"
#include "gate/gate.h"
#include "memory/contexts.h"

namespace phos::safe_points {
namespace {

using wire::State;

constexpr int kNoClient = -1;
constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kPatience = 2 * kSecond;   // for phosd to take a connection
constexpr uint64_t kTalkEnds = 10 * kSecond;  // more than a thread's talk with phosd can take
constexpr uint64_t kNobodyOpens = 10 * kSecond;
constexpr uint64_t kLeft = 10 * kSecond;  // an interpreter's thread may be interrupted before it
                                          // could say that it leaves
constexpr size_t kMaxWaiting = 256;

// A thread's wait. It goes on while the thread is back in the program for a moment, as an
// interpreter that looks for signals is. `over` is the futex that the thread sleeps on.
struct Wait {
    uint64_t ticket;  // 0: free
    uint64_t wish;    // the checkpoint that it asks for, shared with others; 0: none yet
    uint64_t stops;   // when it began
    uint64_t until;   // when it counts as left if the thread has not come back
    uint32_t then;
    char name[PHOS_NAME_BYTES];  // of the image that it asks for; empty: the program's
    bool asks;
    bool in_image;  // it has waited through a stop, so that an image made of that has it
    std::atomic<int> over;
    int outcome;
    char why[PHOS_WHY_BYTES];
};

// The daemon that answered at phosd's socket. A phosd that was started anew knows nothing of the
// wish.
struct Daemon {
    dev_t device;
    ino_t inode;
    timespec changed;
    pid_t pid;  // 0: in a pid namespace that this process does not see
};

char path_of_socket[sizeof sockaddr_un{}.sun_path];  // written once
std::atomic<const char*> socket_path{""};            // of phosd; empty before the start

std::mutex mutex;  // guards what follows; never held during a wait or a call that may take long
Wait waits[kMaxWaiting];
uint64_t last_ticket = 0;
uint64_t last_wish = 0;
uint64_t wish = 0;  // the one that phosd knows, or is about to know
uint32_t wish_then = 0;
char wish_name[PHOS_NAME_BYTES];
bool wish_told = false;
Daemon daemon{};
bool telling = false;  // a thread talks to phosd
bool away = false;     // detached
int wanted_by = kNoClient;
bool refused = false;
char refusal[sizeof wire::ProgramState{}.reason];
uint64_t stops = 0;
// The process's start time when it was detached: a restored one has another.
uint64_t started_at = 0;
uint64_t woken_at = 0;  // of a restored process whose gate nobody has opened yet; 0: none

// What the program may look at as often as it likes.
std::atomic<bool> wanted{false};
std::atomic<bool> declared{false};

// Held while a thread of the program has the mutex or a socket: it is not cancelled, and no signal
// handler runs, out of which it might jump. Its errno stays as it was.
class Undisturbed {
  public:
    Undisturbed() {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_);
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &signals_);
    }
    ~Undisturbed() {
        pthread_sigmask(SIG_SETMASK, &signals_, nullptr);
        pthread_setcancelstate(cancel_, nullptr);
    }
    Undisturbed(const Undisturbed&) = delete;
    Undisturbed& operator=(const Undisturbed&) = delete;

  private:
    KeepErrno errno_;
    int cancel_ = 0;
    sigset_t signals_;
};

Wait* find(uint64_t ticket) {
    for (Wait& wait : waits)
        if (ticket && wait.ticket == ticket) return &wait;
    return nullptr;
}

bool going_on(const Wait& wait) {
    return wait.ticket && !wait.over.load(std::memory_order_relaxed);
}

void end(Wait& wait, int outcome, const char* why = "") {
    wait.outcome = outcome;
    std::snprintf(wait.why, sizeof wait.why, "%s", why);
    wait.over.store(1, std::memory_order_release);
    syscall(SYS_futex, &wait.over, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, nullptr, nullptr, 0);
}

void forget_wish() {
    wish = 0;
    wish_told = false;
}

void end_wish(int outcome, const char* why) {
    for (Wait& wait : waits)
        if (going_on(wait) && wait.asks && wait.wish == wish) end(wait, outcome, why);
    forget_wish();
}

// Lets the threads at a safe point go on, if nobody waits for it any more.
void release() {
    if (wanted_by != kNoClient || away || woken_at || gate::state() != State::running) return;
    for (Wait& wait : waits)
        if (going_on(wait) && !wait.asks)
            end(wait, wait.stops == stops ? PHOS_NOTHING : PHOS_STOPPED);
}

void restored() {
    woken_at = 0;
    forget_wish();
    for (Wait& wait : waits) {
        wait.wish = 0;  // who has begun since asks anew
        if (going_on(wait) && wait.in_image) end(wait, PHOS_RESTORED);
    }
}

void not_wanted() {
    wanted_by = kNoClient;
    wanted.store(false, std::memory_order_relaxed);
}

bool wish_is(uint32_t then, const char* name) {
    return wish && wish_then == then && std::strcmp(wish_name, name) == 0;
}

// Gives the wait a wish, unless there is another one that it cannot share.
void join(Wait& wait) {
    if (!wish) {
        wish = ++last_wish;
        wish_then = wait.then;
        std::memcpy(wish_name, wait.name, sizeof wish_name);
    }
    if (wish_is(wait.then, wait.name)) wait.wish = wish;
}

// Returns whether the thread is to tell phosd of its wish: one of those that share it does.
bool tells(const Wait& wait) {
    if (!going_on(wait) || !wish || wait.wish != wish) return false;
    if (wish_told || telling || away || woken_at) return false;
    return telling = true;
}

// The rest of this part runs without the mutex, in threads of the program.

bool look_at_socket(Daemon* found) {
    struct stat info{};
    if (lstat(socket_path.load(), &info) != 0 || !S_ISSOCK(info.st_mode) ||
        (info.st_uid != 0 && info.st_uid != geteuid()))
        return false;
    *found = {info.st_dev, info.st_ino, info.st_ctim, 0};
    return true;
}

bool is_gone(const Daemon& known) {
    Daemon now{};
    if (!look_at_socket(&now)) return true;
    const bool same = now.device == known.device && now.inode == known.inode &&
                      now.changed.tv_sec == known.changed.tv_sec &&
                      now.changed.tv_nsec == known.changed.tv_nsec;
    return !same || (known.pid > 0 && kill(known.pid, 0) != 0 && errno == ESRCH);
}

// Connects to phosd. Returns -1 if nobody is there. Does not wait for a phosd that stands still,
// nor longer than `patience` for one that is busy.
int connect_to(Daemon* found, uint64_t patience) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (!look_at_socket(found)) return -1;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path.load());
    const int connection =
        descriptors::keep(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
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

// Tells phosd of a wish. Returns PHOS_WAITING if phosd has heard it.
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

void tell_phosd_of(uint64_t number, uint32_t then, const char* name) {
    Daemon found{};
    char why[PHOS_WHY_BYTES] = "";
    const int outcome = tell(number, then, name, &found, why, sizeof why);
    const std::lock_guard lock(mutex);
    telling = false;
    if (wish != number) return;  // all who asked have left meanwhile, or it was answered already
    if (outcome != PHOS_WAITING) {
        end_wish(outcome, why);
        return;
    }
    daemon = found;
    wish_told = true;
}

void look_for_phosd(uint64_t number, const Daemon& known) {
    if (!is_gone(known)) return;
    const std::lock_guard lock(mutex);
    if (wish == number && wish_told && !away && !woken_at)
        end_wish(PHOS_FAILED,
                 "NoSuchProcess: phosd ended, or was restarted, while it was to save this "
                 "process; `phos images` tells whether the image is complete");
}

// The first part of a wait: asks phosd, if it is for this thread to do. Null if there is no such
// ticket.
const Wait* begin_to_wait(uint64_t ticket, int milliseconds) {
    const Undisturbed thread;
    uint64_t number = 0;
    uint32_t then = 0;
    char name[PHOS_NAME_BYTES];
    Wait* wait = nullptr;
    {
        const std::lock_guard lock(mutex);
        wait = find(ticket);
        if (!wait) return nullptr;
        wait->until = monotonic_ns() + static_cast<uint64_t>(milliseconds) * 1'000'000 + kLeft;
        if (going_on(*wait) && wait->asks && !wait->wish) join(*wait);
        release();
        if (!tells(*wait)) return wait;
        number = wait->wish;
        then = wait->then;
        std::memcpy(name, wait->name, sizeof name);
    }
    tell_phosd_of(number, then, name);
    return wait;
}

// The last part: looks whether phosd still knows of it.
int outcome_of(const Wait& wait, char* why, size_t size) {
    const Undisturbed thread;
    Daemon known{};
    uint64_t number = 0;
    {
        const std::lock_guard lock(mutex);
        const bool waits = going_on(wait) && wait.wish && wait.wish == wish && wish_told;
        if (waits && !away && !woken_at && gate::state() == State::running) number = wish;
        known = daemon;
    }
    if (number) look_for_phosd(number, known);
    const std::lock_guard lock(mutex);
    if (going_on(wait)) return PHOS_WAITING;
    if (why && size) std::snprintf(why, size, "%s", wait.why);
    return wait.outcome;
}

}  // namespace

void start(const std::string& runtime_folder) {
    const std::string path = runtime_folder + "/program.sock";
    if (path.size() >= sizeof path_of_socket) return;  // phosd cannot listen there either
    std::memcpy(path_of_socket, path.c_str(), path.size() + 1);
    socket_path = path_of_socket;
}

bool call_phosd() {
    Daemon found{};
    const int connection = connect_to(&found, 0);
    if (connection < 0) return false;
    descriptors::release(connection);
    return true;
}

wire::ProgramState state() {
    const std::lock_guard lock(mutex);
    wire::ProgramState said{};
    said.declared = declared.load(std::memory_order_relaxed);
    said.refused = refused;
    said.wish = wish;
    std::memcpy(said.reason, refusal, sizeof said.reason);
    const uint64_t now = monotonic_ns();
    for (const Wait& wait : waits) said.waiting += going_on(wait) && now < wait.until;
    return said;
}

void want(int client) {
    const std::lock_guard lock(mutex);
    wanted_by = client;
    refused = false;
    refusal[0] = 0;
    wanted.store(true, std::memory_order_relaxed);
}

void client_lost(int client) {
    const std::lock_guard lock(mutex);
    if (client != wanted_by) return;
    not_wanted();
    release();
}

void pass() {
    const std::lock_guard lock(mutex);
    if (away || woken_at || gate::state() != State::running) return;
    for (Wait& wait : waits)
        if (going_on(wait) && !wait.asks) end(wait, PHOS_NOTHING);
}

void answer(const wire::ProgramAsk& told) {
    char text[PHOS_WHY_BYTES];
    std::snprintf(text, sizeof text, "%.*s", static_cast<int>(sizeof told.text), told.text);
    const bool saved = told.outcome == PHOS_SAVED;
    const std::lock_guard lock(mutex);
    for (Wait& wait : waits) {
        if (!going_on(wait) || !wait.asks) continue;
        const bool same = wait.then == told.then && std::strcmp(wait.name, text) == 0;
        const bool meant = told.wish ? wait.wish == told.wish : saved && same;
        if (!meant) continue;
        if (!saved)
            end(wait, PHOS_FAILED, text);
        else if (wait.in_image)
            end(wait, PHOS_SAVED);
        else if (wait.wish == told.wish)
            wait.wish = 0;  // it came after the stop: it asks anew
    }
    if (!wish) return;
    const bool still = std::any_of(std::begin(waits), std::end(waits), [](const Wait& wait) {
        return going_on(wait) && wait.wish == wish;
    });
    if (told.wish == wish || !still) forget_wish();
}

void stopped() {
    const std::lock_guard lock(mutex);
    ++stops;
    for (Wait& wait : waits) wait.in_image = wait.in_image || going_on(wait);
}

bool detach() {
    {
        const std::lock_guard lock(mutex);
        away = true;
    }
    const uint64_t until = monotonic_ns() + kTalkEnds;
    for (;;) {
        {
            const std::lock_guard lock(mutex);
            if (!telling) break;
            if (monotonic_ns() > until) {
                away = false;
                return false;
            }
        }
        pause_for(1'000'000);
    }
    stopped();
    const std::lock_guard lock(mutex);
    started_at = began(getpid());
    not_wanted();  // its connection ends now
    return true;
}

void awake() {
    const uint64_t now_started_at = began(getpid());
    const std::lock_guard lock(mutex);
    away = false;
    if (now_started_at != started_at) woken_at = monotonic_ns();
    release();
}

void gate_opened() {
    const std::lock_guard lock(mutex);
    if (woken_at) restored();
    release();
}

void tidy() {
    const std::lock_guard lock(mutex);
    // A phosd that was killed has left the restored program running.
    if (woken_at && gate::state() == State::running && monotonic_ns() > woken_at + kNobodyOpens)
        restored();
    release();
}

// -- what the program calls ------------------------------------------------------------------

#pragma GCC visibility push(default)
extern "C" {

phos_program_wanted_t phos_program_wanted;
phos_program_declare_t phos_program_declare;
phos_program_refuse_t phos_program_refuse;
phos_program_begin_t phos_program_begin;
phos_program_begin_named_t phos_program_begin_named;
phos_program_wait_t phos_program_wait;
phos_program_leave_t phos_program_leave;

int phos_program_wanted() {
    if (!declared.load(std::memory_order_relaxed)) declared.store(true, std::memory_order_relaxed);
    return wanted.load(std::memory_order_relaxed) && active();
}

void phos_program_declare(int has_safe_points) {
    declared.store(has_safe_points != 0, std::memory_order_relaxed);
}

void phos_program_refuse(const char* why) {
    if (!active()) return;
    const Undisturbed thread;
    const std::lock_guard lock(mutex);
    if (wanted_by == kNoClient) return;
    refused = true;
    std::snprintf(refusal, sizeof refusal, "%s", why ? why : "");
}

uint64_t phos_program_begin(int kind, int then) {
    return phos_program_begin_named(kind, then, nullptr);
}

uint64_t phos_program_begin_named(int kind, int then, const char* name) {
    if (!name) name = "";
    const bool too_long = strnlen(name, PHOS_NAME_BYTES) == PHOS_NAME_BYTES;
    if (!active() || then < PHOS_RUN || then > PHOS_HOLD) return 0;
    const Undisturbed thread;
    const bool asks = kind != PHOS_AT_SAFE_POINT;
    const bool capturing = contexts::captures() != 0;
    if (capturing && !asks) return 0;  // no safe point: no stream can be saved now
    const std::lock_guard lock(mutex);
    if (kind == PHOS_JOINS && (too_long || !wish_is(static_cast<uint32_t>(then), name))) return 0;
    for (Wait& wait : waits) {
        if (wait.ticket) continue;
        wait.ticket = ++last_ticket;
        wait.wish = kind == PHOS_JOINS ? wish : 0;
        wait.stops = stops;
        wait.until = monotonic_ns() + kLeft;
        wait.then = static_cast<uint32_t>(then);
        std::snprintf(wait.name, sizeof wait.name, "%s", name);
        wait.asks = asks;
        wait.in_image = false;
        wait.over.store(0, std::memory_order_relaxed);
        if (asks && !wait.wish && !capturing && !too_long) join(wait);
        if (too_long)
            end(wait, PHOS_FAILED, "InvalidOption: the name of an image has at most 63 characters");
        else if (capturing)
            end(wait, PHOS_FAILED,
                "Unsupported: a stream capture is under way; ask when it has ended");
        return wait.ticket;
    }
    return 0;
}

int phos_program_wait(uint64_t ticket, int milliseconds, char* why, size_t size) {
    if (!active()) return PHOS_NOTHING;
    milliseconds = std::clamp(milliseconds, 0, 60'000);
    const Wait* const wait = begin_to_wait(ticket, milliseconds);
    if (!wait) return PHOS_NOTHING;
    if (!wait->over.load(std::memory_order_acquire)) {
        const KeepErrno keep;
        const timespec time{milliseconds / 1000, milliseconds % 1000 * 1'000'000l};
        // Returns early for a signal, which an interpreter looks at then.
        syscall(SYS_futex, &wait->over, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, 0, &time, nullptr, 0);
    }
    return outcome_of(*wait, why, size);
}

void phos_program_leave(uint64_t ticket) {
    if (!active()) return;
    const Undisturbed thread;
    const std::lock_guard lock(mutex);
    Wait* const wait = find(ticket);
    if (!wait) return;
    const uint64_t left = wait->wish;
    wait->ticket = 0;
    if (!left || left != wish) return;
    for (const Wait& other : waits)
        if (going_on(other) && other.wish == left) return;
    forget_wish();  // phosd's job finds that nobody wants it any more
}
}
#pragma GCC visibility pop

}  // namespace phos::safe_points

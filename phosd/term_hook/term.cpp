// Holds SIGTERM, for `phos run --on-term=save`, until the program is saved.
//
// systemd, Slurm and others send SIGTERM to all processes of a job at once. The relay (`phos run`)
// has the program saved then, so its processes must live until that is done. This library is
// preloaded into each of them. It takes the place of SIGTERM's action, and remembers the program's
// own. What comes from outside of the tree it writes to a file that the relay reads, and holds;
// what processes of the program send each other it passes to the program's action at once. It holds
// only while a relay lives, which has a lock on another file. The relay gives a held signal back by
// another SIGTERM with a value (sigqueue(3)).
//
// It must work in any program: it needs no memory, no lock that a handler could meet, no CUDA.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" int __sigaction(int, const struct sigaction*, struct sigaction*);

namespace {

// phosd/cli/run_command/termination.py has the same.
constexpr int kDeliver = 0x50485401;        // to the program, whatever was before
constexpr int kDeliverIfHeld = 0x50485402;  // if one was held
constexpr int kMostAncestors = 256;

// Set before main() and constant from then on.
bool holding = false;
pid_t root = 0;  // of the process tree
char lock_path[PATH_MAX];
char held_path[PATH_MAX];

// Whose memory this is. The child of a vfork(2) is another process in the same memory until it
// executes something, and resets its signals before: that must not change what the parent has.
std::atomic<pid_t> owner{0};

std::atomic<bool> held{false};

bool is_owner() {
    return getpid() == owner.load(std::memory_order_relaxed);
}

// The program's own action. Handlers read it without a lock, and read again if it changed
// meanwhile; a writer blocks all signals, so no handler waits for the thread that it has
// interrupted.
struct sigaction own_action{};
std::atomic<unsigned> changes{0};
std::atomic_flag changing = ATOMIC_FLAG_INIT;

void begin_change(sigset_t* before) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
    while (changing.test_and_set(std::memory_order_acquire)) {
    }
    changes.fetch_add(1, std::memory_order_seq_cst);
}

void end_change(const sigset_t* before) {
    changes.fetch_add(1, std::memory_order_seq_cst);
    changing.clear(std::memory_order_release);
    pthread_sigmask(SIG_SETMASK, before, nullptr);
}

class Changing {
  public:
    Changing() { begin_change(&before_); }
    ~Changing() { end_change(&before_); }
    Changing(const Changing&) = delete;
    Changing& operator=(const Changing&) = delete;

  private:
    sigset_t before_;
};

struct sigaction read_action() {
    for (;;) {
        const unsigned before = changes.load(std::memory_order_seq_cst);
        struct sigaction found;
        std::memcpy(&found, &own_action, sizeof found);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!(before & 1) && changes.load(std::memory_order_seq_cst) == before) return found;
    }
}

// Returns the parent of a process, or 0 if there is no such process.
pid_t parent_of(pid_t pid) {
    char path[32];
    char digits[16];
    int length = 0;
    do digits[length++] = static_cast<char>('0' + pid % 10);
    while (pid /= 10);
    std::memcpy(path, "/proc/", 6);
    char* end = path + 6;
    while (length) *end++ = digits[--length];
    std::memcpy(end, "/stat", 6);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    char text[512];
    const ssize_t read_bytes = read(file, text, sizeof text - 1);
    close(file);
    if (read_bytes <= 0) return 0;
    text[read_bytes] = 0;
    // "pid (name) state ppid": the name may have anything in it.
    const char* at = std::strrchr(text, ')');
    if (!at || std::strlen(at) < 5) return 0;
    pid_t parent = 0;
    for (at += 4; *at >= '0' && *at <= '9'; ++at) parent = parent * 10 + (*at - '0');
    return parent;
}

bool is_in_tree(pid_t pid) {
    for (int generation = 0; pid > 0 && generation < kMostAncestors; ++generation) {
        if (pid == root) return true;
        pid = parent_of(pid);
    }
    return false;
}

bool relay_lives() {
    const int file = open(lock_path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) return false;
    const bool locked = flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(file);
    return locked;
}

// Tells the relay that this process holds a signal: a line with its pid.
bool tell_relay() {
    const int file = open(held_path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) return false;
    char line[16];
    char* at = line + sizeof line;
    *--at = '\n';
    pid_t pid = getpid();
    do *--at = static_cast<char>('0' + pid % 10);
    while (pid /= 10);
    const ssize_t length = line + sizeof line - at;
    const bool told = write(file, at, static_cast<size_t>(length)) == length;
    close(file);
    return told;
}

bool is_to_be_held(const siginfo_t& info) {
    switch (info.si_code) {
        case SI_QUEUE:
            if (info.si_value.sival_int == kDeliver) return false;
            if (info.si_value.sival_int == kDeliverIfHeld) return false;
            break;
        case SI_USER:
        case SI_TKILL:
            break;
        default:  // a timer of its own, or the like
            return false;
    }
    if (info.si_pid > 0 && is_in_tree(info.si_pid)) return false;
    return relay_lives() && tell_relay();
}

void pass_on(int number, siginfo_t* info, void* context) {
    const struct sigaction action = read_action();
    if (!(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_DFL) {
        // Comes when this handler returns, since the signal is blocked until then.
        struct sigaction standard{};
        standard.sa_handler = SIG_DFL;
        __sigaction(number, &standard, nullptr);
        kill(getpid(), number);
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, number);
        pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
        return;
    }
    if (action.sa_flags & static_cast<int>(SA_RESETHAND)) {
        const Changing change;
        std::memset(&own_action, 0, sizeof own_action);
    }
    if (action.sa_flags & SA_SIGINFO)
        action.sa_sigaction(number, info, context);
    else if (action.sa_handler != SIG_IGN)
        action.sa_handler(number);
}

void on_term(int number, siginfo_t* info, void* context) {
    const int error = errno;
    const bool if_held = info->si_code == SI_QUEUE && info->si_value.sival_int == kDeliverIfHeld;
    if (is_to_be_held(*info)) {
        if (is_owner()) held.store(true, std::memory_order_relaxed);
    } else if (held.exchange(false, std::memory_order_relaxed) || !if_held)
        pass_on(number, info, context);
    errno = error;
}

// Installs what stands for the program's action. A program that ignores SIGTERM needs nobody to
// hold it.
int install(const struct sigaction& wanted) {
    struct sigaction action = wanted;
    const bool has_handler = (wanted.sa_flags & SA_SIGINFO) || wanted.sa_handler != SIG_DFL;
    if (!(wanted.sa_flags & SA_SIGINFO) && wanted.sa_handler == SIG_IGN)
        return __sigaction(SIGTERM, &action, nullptr);
    action.sa_sigaction = on_term;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    if (has_handler)
        action.sa_flags = SA_SIGINFO | (wanted.sa_flags & (SA_RESTART | SA_ONSTACK | SA_NODEFER));
    return __sigaction(SIGTERM, &action, nullptr);
}

int change(const struct sigaction* wanted, struct sigaction* before) {
    if (!is_owner()) {
        if (before) *before = read_action();
        return wanted ? __sigaction(SIGTERM, wanted, nullptr) : 0;
    }
    const Changing changing_now;
    struct sigaction earlier = own_action;
    if (wanted) {
        if (const int failed = install(*wanted); failed) return failed;
        std::memcpy(&own_action, wanted, sizeof own_action);
    }
    if (before) *before = earlier;
    return 0;
}

using Handler = sighandler_t;

Handler change_handler(Handler handler, int flags) {
    struct sigaction wanted{};
    struct sigaction before{};
    wanted.sa_handler = handler;
    wanted.sa_flags = flags;
    sigemptyset(&wanted.sa_mask);
    if (!(flags & SA_NODEFER)) sigaddset(&wanted.sa_mask, SIGTERM);
    if (change(&wanted, &before) != 0) return SIG_ERR;
    return before.sa_handler;
}

bool copy_path(char* target, const char* folder, const char* name) {
    const int length = std::snprintf(target, PATH_MAX, "%s/%s", folder, name);
    return length > 0 && length < PATH_MAX;
}

sigset_t mask_at_fork;

// No thread changes the action while the process is copied.
void before_fork() {
    sigset_t mask;
    begin_change(&mask);
    mask_at_fork = mask;
}

void after_fork() {
    const sigset_t mask = mask_at_fork;
    end_change(&mask);
}

void after_fork_in_child() {
    owner.store(getpid(), std::memory_order_relaxed);
    held.store(false, std::memory_order_relaxed);
    after_fork();
}

__attribute__((constructor)) void begin() {
    const char* folder = std::getenv("PHOS_TERM_DIR");
    if (!folder || folder[0] != '/') return;
    if (!copy_path(lock_path, folder, "relay") || !copy_path(held_path, folder, "held")) return;
    const char* told = std::getenv("PHOS_TERM_ROOT");
    root = told ? static_cast<pid_t>(std::atoi(told)) : 0;
    if (root <= 0) {
        root = getpid();
        char text[16];
        std::snprintf(text, sizeof text, "%d", root);
        setenv("PHOS_TERM_ROOT", text, 1);
    }
    struct sigaction now{};
    if (__sigaction(SIGTERM, nullptr, &now) != 0) return;
    if (pthread_atfork(before_fork, after_fork, after_fork_in_child) != 0) return;
    owner.store(getpid(), std::memory_order_relaxed);
    holding = true;
    change(&now, nullptr);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int sigaction(int number, const struct sigaction* wanted,
                                                     struct sigaction* before) {
    if (number != SIGTERM || !holding) return __sigaction(number, wanted, before);
    return change(wanted, before);
}

// Others than SIGTERM go to libc by another name of the function, which has siginterrupt(3) in it.
__attribute__((visibility("default"))) Handler signal(int number, Handler handler) noexcept {
    if (number != SIGTERM || !holding) return ssignal(number, handler);
    return change_handler(handler, SA_RESTART);
}

__attribute__((visibility("default"))) Handler bsd_signal(int number, Handler handler) {
    return signal(number, handler);
}

__attribute__((visibility("default"))) Handler sysv_signal(int number, Handler handler) noexcept {
    constexpr int kOnce = static_cast<int>(SA_RESETHAND) | SA_NODEFER;
    if (number == SIGTERM && holding) return change_handler(handler, kOnce);
    struct sigaction wanted{};
    struct sigaction before{};
    wanted.sa_handler = handler;
    wanted.sa_flags = kOnce;
    return __sigaction(number, &wanted, &before) == 0 ? before.sa_handler : SIG_ERR;
}

__attribute__((visibility("default"))) Handler __sysv_signal(int number, Handler handler) noexcept {
    return sysv_signal(number, handler);
}

}  // extern "C"

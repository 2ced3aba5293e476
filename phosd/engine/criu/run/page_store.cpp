// Loaded into `criu dump`: copies memory pages with many threads, into memory that is there
// already.
//
// CRIU has the pages of a frozen process in a pipe, by reference, and moves them to an image file
// with splice(2), which copies them one after the other into pages of the file system that it has
// to find first: 1.3 GB took 0.45 s of the time that a program stands still. Here the pipe's pages
// are moved, still by reference, to a pipe of our own, and threads copy them to a store that was
// mapped and touched before. A ledger says which bytes of which file are where;
// phosd/engine/criu/run/page_store.py lays out both, waits until all is copied before it lets the
// process go on, and puts the files together when it runs. Whatever cannot be done so is left to
// the real splice.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr uint64_t kMagic = 0x5345474150534F50;  // "POSPAGES"
constexpr size_t kLeast = 64 << 10;              // bytes; less is not worth a thread
constexpr int kPipe = 1 << 20;                   // bytes, as CRIU's own pipes
constexpr unsigned kLanes = 32;
constexpr unsigned kMostThreads = 16;
constexpr rlim_t kDescriptors = 16 << 10;

struct Entry {
    uint64_t device;
    uint64_t inode;
    uint64_t position;  // in the file
    uint64_t place;     // in the store, from its beginning
    uint64_t length;
};

struct Ledger {
    uint64_t magic;
    uint64_t data_at;   // where the pages begin, bytes from the store's beginning
    uint64_t capacity;  // entries that fit
    std::atomic<uint64_t> submitted;
    std::atomic<uint64_t> completed;
    std::atomic<uint64_t> failed;
    Entry entries[];
};

using Splice = ssize_t (*)(int, off64_t*, int, off64_t*, size_t, unsigned);

// Work handed over: `length` bytes wait in the lane's pipe and go to `target`.
struct Lane {
    int in = -1;
    int out = -1;
    char* target = nullptr;
    size_t length = 0;
};

// Lanes by number, in a pipe: a queue that needs nothing but the kernel.
class Queue {
  public:
    bool open() { return pipe2(ends_, O_CLOEXEC) == 0; }
    bool put(unsigned char lane) {
        ssize_t count;
        while ((count = write(ends_[1], &lane, 1)) < 0 && errno == EINTR) {
        }
        return count == 1;
    }
    bool take(unsigned char* lane) {  // waits for one
        ssize_t count;
        while ((count = read(ends_[0], lane, 1)) < 0 && errno == EINTR) {
        }
        return count == 1;
    }

  private:
    int ends_[2];
};

Ledger* ledger = nullptr;
uint64_t store_size = 0;
uint64_t next_place = 0;
Lane lanes[kLanes];
Queue idle;
Queue waiting;

Splice real_splice() {
    static const auto found = reinterpret_cast<Splice>(dlsym(RTLD_NEXT, "splice"));
    return found;
}

bool copy(const Lane& lane) {
    size_t done = 0;
    while (done < lane.length) {
        const ssize_t count = read(lane.out, lane.target + done, lane.length - done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return false;
        done += static_cast<size_t>(count);
    }
    return true;
}

void* work(void*) {
    unshare(CLONE_FS);  // CRIU may enter a mount namespace, which wants a file system of its own
    unsigned char number;
    while (waiting.take(&number)) {
        if (!copy(lanes[number])) ledger->failed.fetch_add(1);
        ledger->completed.fetch_add(1, std::memory_order_release);
        idle.put(number);
    }
    return nullptr;
}

bool start_threads() {
    if (!idle.open() || !waiting.open()) return false;
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const unsigned wanted = processors < 2              ? 1
                            : processors > kMostThreads ? kMostThreads
                                                        : static_cast<unsigned>(processors);
    unsigned running = 0;
    for (; running < wanted; ++running) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, work, nullptr) != 0) break;
        pthread_detach(thread);
    }
    if (!running) return false;
    for (unsigned char number = 0; number < kLanes; ++number) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) != 0) return number > 0;
        fcntl(ends[1], F_SETPIPE_SZ, kPipe);  // a smaller one takes less at a time
        lanes[number].out = ends[0];
        lanes[number].in = ends[1];
        if (!idle.put(number)) return false;
    }
    return true;
}

void in_child() {
    ledger = nullptr;  // its threads stayed behind
}

// CRIU takes the descriptors of the frozen process while our threads are there. Whenever the table
// of descriptors of a process with threads grows, the kernel waits until every processor has
// passed a quiet state (synchronize_rcu, 25 ms); so it grows now, and stays as large.
void make_room_for_descriptors(int fd) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == 0) return;
    const int last = fcntl(fd, F_DUPFD_CLOEXEC, int(std::min(kDescriptors, limit.rlim_cur) - 1));
    if (last >= 0) close(last);
}

__attribute__((constructor)) void begin() {
    const char* text = getenv("PHOS_PAGES");
    char* rest = nullptr;
    const long number = text ? std::strtol(text, &rest, 10) : -1;
    const int fd = number > STDERR_FILENO && number <= INT_MAX && *rest == 0 ? int(number) : -1;
    // NOLINTBEGIN(concurrency-mt-unsafe): no other thread is there yet
    unsetenv("LD_PRELOAD");  // not for what CRIU starts
    unsetenv("PHOS_PAGES");
    // NOLINTEND(concurrency-mt-unsafe)
    struct stat status{};
    if (fd < 0 || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return;
    store_size = static_cast<uint64_t>(status.st_size);
    if (store_size < sizeof(Ledger)) return;
    void* store =
        mmap(nullptr, store_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    make_room_for_descriptors(fd);
    close(fd);
    if (store == MAP_FAILED) return;
    auto* found = static_cast<Ledger*>(store);
    if (found->magic != kMagic) return;
    next_place = found->data_at;
    ledger = found;
    pthread_atfork(nullptr, nullptr, in_child);
}

// The bytes taken over; 0 when this is not for us.
size_t take_over(int from, int to, size_t length) {
    static const bool ready = start_threads();
    struct stat status{};
    if (!ready || fstat(to, &status) != 0 || !S_ISREG(status.st_mode)) return 0;
    const uint64_t entry = ledger->submitted.load(std::memory_order_relaxed);
    if (entry == ledger->capacity || length > store_size - next_place) return 0;
    const off64_t position = lseek64(to, 0, SEEK_CUR);
    unsigned char number;
    if (position < 0 || !idle.take(&number)) return 0;
    Lane& lane = lanes[number];
    const ssize_t moved =
        real_splice()(from, nullptr, lane.in, nullptr, length, SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
    if (moved <= 0) {
        idle.put(number);
        return 0;
    }
    lseek64(to, moved, SEEK_CUR);
    lane.target = reinterpret_cast<char*>(ledger) + next_place;
    lane.length = static_cast<size_t>(moved);
    ledger->entries[entry] = {status.st_dev, status.st_ino, static_cast<uint64_t>(position),
                              next_place, lane.length};
    next_place += lane.length;
    ledger->submitted.store(entry + 1, std::memory_order_release);
    waiting.put(number);
    return lane.length;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ssize_t splice(int from, off64_t* from_at, int to,
                                                                 off64_t* to_at, size_t length,
                                                                 unsigned flags) {
    if (ledger && !from_at && !to_at && length >= kLeast)
        if (const size_t count = take_over(from, to, length)) return static_cast<ssize_t>(count);
    return real_splice()(from, from_at, to, to_at, length, flags);
}

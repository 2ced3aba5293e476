#include "core/registry.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/descriptor.h"
#include "core/error.h"

namespace phos::softgpu {
namespace {

struct Record {
    uint64_t inode;
    uint64_t bytes;
    uint64_t token;  // of the process
    uint32_t pid;
    uint32_t claims;  // a process may hold its own export as an import, too
};
static_assert(sizeof(Record) == 32);
constexpr off_t kMaxFile = 64 << 20;
constexpr char kPrefix[] = "phos-softgpu-";

// Opens without following a link and without trusting what is there: any user may write here.
Descriptor open_file(const std::string& folder, const std::string& path) {
    if (mkdir(folder.c_str(), 01777) == 0) chmod(folder.c_str(), 01777);  // whatever the umask
    int fd = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) {
        fd = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_CREAT | O_EXCL, 0666);
        if (fd >= 0)
            fchmod(fd, 0666);
        else if (errno == EEXIST)
            fd = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    }
    Descriptor file(fd);
    struct stat status{};
    if (!file || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_nlink != 1 ||
        status.st_size > kMaxFile) {
        explain("cannot account device memory in " + path + ": " +
                (file ? "not a plain file of its own" : std::strerror(errno)) +
                "; remove it or set PHOS_SOFTGPU_DIR to another folder");
        fail(CUDA_ERROR_OPERATING_SYSTEM);
    }
    return file;
}

// Held for microseconds; a holder that was stopped must not stop the machine, so give up in time.
void lock_file(int fd, const std::string& path) {
    for (int attempt = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; ++attempt) {
        if (attempt == 10'000) {
            explain("the lock on " + path + " was not released within 10 s; who holds it?");
            fail(CUDA_ERROR_SYSTEM_NOT_READY);
        }
        usleep(1000);
    }
}

// The records, read under the lock and written back where they changed.
class Ledger {
  public:
    Ledger(const std::string& folder, const std::string& path) : file_(open_file(folder, path)) {
        lock_file(file_.get(), path);
        struct stat status{};
        require(fstat(file_.get(), &status) == 0, CUDA_ERROR_OPERATING_SYSTEM);
        records.resize(static_cast<size_t>(status.st_size) / sizeof(Record));
        const size_t bytes = records.size() * sizeof(Record);
        const ssize_t got = pread(file_.get(), records.data(), bytes, 0);
        require(got == static_cast<ssize_t>(bytes), CUDA_ERROR_OPERATING_SYSTEM);
    }

    void save() {
        const size_t bytes = records.size() * sizeof(Record);
        require(pwrite(file_.get(), records.data(), bytes, 0) == static_cast<ssize_t>(bytes) &&
                    ftruncate(file_.get(), static_cast<off_t>(bytes)) == 0,
                CUDA_ERROR_OPERATING_SYSTEM);
    }

    uint64_t used() const {
        std::unordered_set<uint64_t> seen;
        uint64_t sum = 0;
        for (const Record& record : records)
            if (seen.insert(record.inode).second) sum += record.bytes;
        return sum;
    }

    Record* find(uint64_t token, uint64_t inode) {
        for (Record& record : records)
            if (record.token == token && record.inode == inode) return &record;
        return nullptr;
    }

    // A pid may have been given to another program and a start time differs between time
    // namespaces (a restored process lives in its own); the socket's name does neither.
    void drop_dead() {
        std::unordered_set<std::string> living;
        for (const ControlSocket& each : control_sockets(kPrefix)) living.insert(each.name);
        const auto dead = [&](const Record& record) {
            if (record.token == own_token()) return false;
            return living.count(control_name(static_cast<int>(record.pid), record.token)) == 0;
        };
        records.erase(std::remove_if(records.begin(), records.end(), dead), records.end());
    }

    std::vector<Record> records;

  private:
    Descriptor file_;
};

uint64_t random_token() {
    uint64_t token = 0;
    while (token == 0)
        require(getrandom(&token, sizeof token, 0) == sizeof token, CUDA_ERROR_OPERATING_SYSTEM);
    return token;
}

std::once_flag g_made;
std::atomic<uint64_t> g_token{0};

}  // namespace

std::string control_name(int pid, uint64_t token) {
    char text[64];
    std::snprintf(text, sizeof text, "%s%d-%016lx", kPrefix, pid,
                  static_cast<unsigned long>(token));
    return text;
}

uint64_t own_token() {
    std::call_once(g_made, [] { g_token = random_token(); });
    return g_token;
}

void take_own_token(uint64_t token) {
    own_token();  // later it would make one
    g_token = token;
}

void forget_own_token() {
    own_token();  // a child makes none
    g_token = 0;
}

std::vector<ControlSocket> control_sockets(const std::string& beginning) {
    std::vector<ControlSocket> sockets;
    std::ifstream table("/proc/net/unix");
    for (std::string line; std::getline(table, line);)
        if (const size_t at = line.find("@" + beginning); at != std::string::npos) {
            std::istringstream before(line.substr(0, at));
            ControlSocket found{line.substr(at + 1), ""};
            while (before >> found.inode) continue;  // the last column before the name
            sockets.push_back(found);
        }
    return sockets;
}

Registry::Registry(std::string folder, unsigned gpu, uint64_t total)
    : folder_(std::move(folder)), path_(folder_ + "/gpu" + std::to_string(gpu)), total_(total) {}

bool Registry::claim(uint64_t inode, uint64_t bytes) {
    Ledger ledger(folder_, path_);
    const bool known = std::any_of(ledger.records.begin(), ledger.records.end(),
                                   [&](const Record& record) { return record.inode == inode; });
    if (!known && ledger.used() + bytes > total_) {
        ledger.drop_dead();
        if (ledger.used() + bytes > total_) {
            ledger.save();
            return false;
        }
    }
    if (Record* record = ledger.find(own_token(), inode))
        ++record->claims;
    else
        ledger.records.push_back({inode, bytes, own_token(), static_cast<uint32_t>(getpid()), 1});
    ledger.save();
    return true;
}

void Registry::release(uint64_t inode) {
    Ledger ledger(folder_, path_);
    Record* record = ledger.find(own_token(), inode);
    if (!record) return;
    if (--record->claims == 0) {
        *record = ledger.records.back();
        ledger.records.pop_back();
    }
    ledger.save();
}

void Registry::release_all() {
    Ledger ledger(folder_, path_);
    const auto ours = [](const Record& record) { return record.token == own_token(); };
    ledger.records.erase(std::remove_if(ledger.records.begin(), ledger.records.end(), ours),
                         ledger.records.end());
    ledger.save();
}

uint64_t Registry::used() {
    Ledger ledger(folder_, path_);
    const size_t before = ledger.records.size();
    ledger.drop_dead();
    if (ledger.records.size() != before) ledger.save();
    return std::min(ledger.used(), total_);
}

}  // namespace phos::softgpu

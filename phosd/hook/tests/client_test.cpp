// What a client of the hook may meet, and what its loss, its nonsense and a fork leave behind.
#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <set>

#include "base/descriptors.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

void the_deadline_opens() {
    CUstream stream = nullptr;
    CUdeviceptr flag = 0;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&flag, 4));
    OK(cuMemsetD32_v2(flag, 0, 1));
    OK(cuCtxSynchronize());  // the streams below do not wait for the memset
    launch(wait_for, stream, flag, 1);
    Client client(getpid());
    const auto began = std::chrono::steady_clock::now();
    CHECK(!client.close_gate(200));
    const auto took = std::chrono::steady_clock::now() - began;
    CHECK(took >= std::chrono::milliseconds(200) && took < std::chrono::seconds(20));
    CHECK(client.hello().state == static_cast<uint32_t>(wire::State::running));
    CUstream other = nullptr;
    OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    launch(set_value, other, flag, 1);
    OK(cuStreamSynchronize(stream));
    OK(cuMemFree_v2(flag));
}

void a_lost_client_opens() {
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 4096));
    Worker worker([memory](unsigned step) { OK(cuMemsetD32_v2(memory, step, 16)); });
    auto client = std::make_unique<Client>(getpid());
    CHECK(client->close_gate(kDeadline));
    Client other(getpid());
    const wire::CloseGate request{100, 0, 0};
    CHECK(other.ask(wire::Type::close_gate, &request, sizeof request).status ==
          wire::Status::wrong_state);
    client.reset();
    worker.more(5);
    CHECK(other.hello().state == static_cast<uint32_t>(wire::State::running));
}

void a_detached_hook_is_woken() {
    const std::string base = hooks_folder() + "/" + std::to_string(getpid());
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 4096));
    OK(cuMemsetD32_v2(memory, 1234, 1024));
    Client client(getpid());
    CHECK(client.close_gate(kDeadline));
    const auto held = client.export_all();
    client.park();
    CHECK(client.ask(wire::Type::detach).status == wire::Status::ok);
    CHECK(access((base + ".sock").c_str(), F_OK) != 0);
    usleep(20000);
    CHECK(access((base + ".sock").c_str(), F_OK) != 0);
    close(open((base + ".wake").c_str(), O_CREAT | O_WRONLY, 0600));
    Client again(getpid());
    unlink((base + ".wake").c_str());
    CHECK(again.hello().state == static_cast<uint32_t>(wire::State::parked));
    again.unpark(held);
    again.open_gate();
    unsigned value = 0;
    OK(cuMemcpyDtoH_v2(&value, memory + 400, 4));
    CHECK(value == 1234);
    OK(cuMemFree_v2(memory));
}

unsigned open_sockets() {
    unsigned count = 0;
    DIR* folder = opendir("/proc/self/fd");
    while (const dirent* entry = readdir(folder)) {
        struct stat info{};
        if (stat((std::string("/proc/self/fd/") + entry->d_name).c_str(), &info) == 0)
            count += S_ISSOCK(info.st_mode);
    }
    closedir(folder);
    return count;
}

// The child's calls go straight to the driver, and it holds none of the hook's sockets.
void a_forked_child_is_left_alone(Client& client) {
    CHECK(client.close_gate(kDeadline));
    const unsigned before = open_sockets();
    const pid_t child = fork();
    if (child == 0) {
        CUdeviceptr memory = 0;
        alarm(10);
        const CUresult result = cuMemAlloc_v2(&memory, 4096);
        _exit(result != CUDA_SUCCESS && open_sockets() < before ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    client.open_gate();
}

void bad_messages_end_only_the_connection() {
    for (const wire::Header header :
         {wire::Header{1, wire::kVersion, 1, 0, 0, 0, 0},
          wire::Header{wire::kMagic, 9, 1, 0, 0, 0, 0},
          wire::Header{wire::kMagic, wire::kVersion, 1, 0, 0, wire::kMaxPayload + 1, 0},
          wire::Header{wire::kMagic, wire::kVersion, 1, 0, 0, 0, 3}}) {
        Client client(getpid());
        CHECK(write(client.socket, &header, sizeof header) == sizeof header);
        char byte = 0;
        const ssize_t got = read(client.socket, &byte, 1);
        CHECK(got == 0 || (got < 0 && errno == ECONNRESET));  // what is no message is left unread
    }
    Client unknown(getpid());
    CHECK(unknown.ask(static_cast<wire::Type>(77)).status == wire::Status::bad_message);
    Client client(getpid());
    CHECK(client.ask(wire::Type::list_blocks).status == wire::Status::bad_message);
    CHECK(Client(getpid()).hello().pid == static_cast<uint32_t>(getpid()));
}

double processor_seconds() {
    timespec used{};
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) == 0);
    return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) / 1e9;
}

void the_hook_rests_for(useconds_t microseconds) {
    const double before = processor_seconds();
    usleep(microseconds);
    CHECK((processor_seconds() - before) * 1e6 < microseconds / 20.0);
}

// Whoever wants to connect while the program has no descriptor left waits, and the hook with them.
void a_full_table_of_descriptors_is_waited_for() {
    Client before(getpid());
    before.hello();
    rlimit limit{};
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    rlimit lower = limit;
    lower.rlim_cur = 128;
    CHECK(setrlimit(RLIMIT_NOFILE, &lower) == 0);
    std::vector<int> fill;
    for (int copy = dup(0); copy >= 0; copy = dup(0)) fill.push_back(copy);
    close(fill.back());
    fill.pop_back();
    auto waiting = std::make_unique<Client>(getpid());
    the_hook_rests_for(500000);
    CHECK(before.hello().pid == static_cast<uint32_t>(getpid()));  // who is in stays in
    waiting.reset();
    CHECK(dup2(0, fill.back()) == fill.back());
    the_hook_rests_for(500000);
    for (const int copy : fill) close(copy);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(Client(getpid()).hello().pid == static_cast<uint32_t>(getpid()));
}

// The inodes of the sockets that listen at an address of this process's hook.
using Inodes = std::set<unsigned long>;

Inodes listeners_at(const std::string& address) {
    std::ifstream sockets("/proc/net/unix");
    Inodes found;
    for (std::string line; std::getline(sockets, line);) {
        const size_t at = line.find(address);
        if (at != std::string::npos && line.find(" 00010000 ") != std::string::npos)
            found.insert(std::stoul(line.substr(line.find_last_of(' ', at - 2))));
    }
    return found;
}

struct Listeners {
    Inodes for_clients;
    Inodes for_peers;
};

Listeners listeners() {
    const std::string pid = std::to_string(getpid());
    return {listeners_at(hooks_folder() + "/" + pid + ".sock"),
            listeners_at("@phos-ipc-" + pid + "-")};
}

bool has_another(const Inodes& now, const Inodes& before) {
    return !std::includes(before.begin(), before.end(), now.begin(), now.end());
}

void wait_for_new_listeners(const Listeners& before) {
    for (int i = 0;; ++i, usleep(1000)) {
        CHECK(i < 20000);
        const Listeners now = listeners();
        if (has_another(now.for_clients, before.for_clients) &&
            has_another(now.for_peers, before.for_peers))
            return;
    }
}

struct stat info_of(int descriptor) {
    struct stat info{};
    stat(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), &info);
    return info;
}

// The sockets and pipes of this process, the hook's among them, but for the standard ones. The
// others are the driver's memory.
std::vector<int> sockets_and_pipes() {
    std::vector<int> found;
    for (int descriptor = 3; descriptor < 1024; ++descriptor) {
        const struct stat info = info_of(descriptor);
        if (S_ISSOCK(info.st_mode) || S_ISFIFO(info.st_mode)) found.push_back(descriptor);
    }
    return found;
}

// Past the thread sanitizer: that this is a race with the hook's thread is the point here. The hook
// may have been faster, which closes what it has seen the other end of go.
void close_unasked(int descriptor) {
    syscall(SYS_close, descriptor);
}

// As a program does that becomes a daemon. A client is lost by it, and others find the hook again.
void a_program_may_close_all_descriptors() {
    alignas(Client) static unsigned char room[sizeof(Client)];
    auto* const lost = new (room) Client(getpid());  // never closed: the number is another's then
    CHECK(lost->close_gate(kDeadline));
    const Listeners before = listeners();
    for (const int descriptor : sockets_and_pipes()) close_unasked(descriptor);
    wait_for_new_listeners(before);
    the_hook_rests_for(500000);
    Client client(getpid());
    CHECK(client.hello().state == static_cast<uint32_t>(wire::State::running));
}

// Also when nobody calls the hook. Until it listens anew, whoever connects is lost: it must not
// wait for its next look, which comes after a second. Two of three times, since others work too.
void closed_listeners_are_replaced_at_once() {
    int at_once = 0;
    for (int i = 0; i < 3; ++i) {
        Client(getpid()).hello();
        the_hook_rests_for(1200000);  // neither with that client, nor wary after the last time
        const Listeners before = listeners();
        const auto began = std::chrono::steady_clock::now();
        for (const int descriptor : sockets_and_pipes()) close_unasked(descriptor);
        wait_for_new_listeners(before);
        at_once += std::chrono::steady_clock::now() - began < std::chrono::milliseconds(300);
        CHECK(Client(getpid()).hello().pid == static_cast<uint32_t>(getpid()));
    }
    CHECK(at_once >= 2);
}

// As when phosd is removed and installed again. Without a folder the hook keeps its socket: the
// folder may only be out of its sight.
void a_new_folder_gets_a_new_socket() {
    const std::string folder = hooks_folder();
    const std::string aside = folder + ".aside";
    const Listeners before = listeners();
    CHECK(rename(folder.c_str(), aside.c_str()) == 0);
    usleep(1500000);  // the hook looks once a second
    CHECK(listeners().for_clients == before.for_clients);
    // What another user has put there is none.
    CHECK(mkdir(folder.c_str(), 0700) == 0);
    if (geteuid() == 0) {
        CHECK(chown(folder.c_str(), 1, 1) == 0);
        usleep(1500000);
        CHECK(listeners().for_clients == before.for_clients);
        CHECK(chown(folder.c_str(), 0, 0) == 0);
    }
    CHECK(Client(getpid()).hello().state == static_cast<uint32_t>(wire::State::running));
    CHECK(listeners().for_clients.size() == 1);
}

// The program closes a descriptor between the hook's opening and keeping it: a listener that is
// taken for the hook's then is never replaced. In this program's own table.
void what_was_closed_before_it_was_kept_is_not_ours() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    close(ends[0]);
    descriptors::keep(ends[0]);
    CHECK(!descriptors::is_ours(ends[0]));
    CHECK(dup2(ends[1], ends[0]) == ends[0]);
    CHECK(!descriptors::is_ours(ends[0]));
    descriptors::release(ends[0]);
    CHECK(info_of(ends[0]).st_ino == info_of(ends[1]).st_ino);  // it stayed open
    const int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(dup2(file, ends[0]) == ends[0]);
    descriptors::keep_socket(ends[0]);  // it was one when it was made
    CHECK(!descriptors::is_ours(ends[0]));
    descriptors::release(ends[0]);
    CHECK(info_of(ends[0]).st_ino == info_of(file).st_ino);
    close(file);
    for (const int end : ends) close(end);
}

// The hook may be about to read from a number that has just become the program's.
void what_is_no_message_stays_where_it_is() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    channel::Message message;
    for (const char* const text : {"x", "not a message, though it is longer than a header"}) {
        const auto size = static_cast<ssize_t>(std::strlen(text));
        CHECK(write(ends[0], text, std::strlen(text)) == size);
        CHECK(!channel::receive(ends[1], &message));
        char found[64];
        CHECK(recv(ends[1], found, sizeof found, MSG_DONTWAIT) == size);
        CHECK(std::memcmp(found, text, std::strlen(text)) == 0);
    }
    // Nor is the rest of one waited for without an end.
    const wire::Header header{wire::kMagic, wire::kVersion, 1, 0, 0, 8, 0};
    CHECK(write(ends[0], &header, sizeof header) == sizeof header);
    CHECK(!channel::receive(ends[1], &message));
    for (const int end : ends) close(end);
}

// What a program opens after it has closed all descriptors may have the hook's numbers: the hook
// does not read from it, nor close it.
void numbers_that_are_the_programs_are_left_alone() {
    alignas(Client) static unsigned char room[sizeof(Client)];
    auto* const lost = new (room) Client(getpid());
    lost->hello();
    const Listeners before = listeners();
    const std::vector<int> numbers = sockets_and_pipes();
    int own[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, own) == 0);
    CHECK(write(own[0], "x", 1) == 1);
    for (const int number : numbers) CHECK(syscall(SYS_dup3, own[1], number, 0) == number);
    wait_for_new_listeners(before);
    the_hook_rests_for(500000);
    for (const int number : numbers) {
        CHECK(info_of(number).st_ino == info_of(own[1]).st_ino);
        close_unasked(number);
    }
    char byte = 0;
    CHECK(recv(own[1], &byte, 1, MSG_DONTWAIT) == 1 && byte == 'x');
    close(own[0]);
    close(own[1]);
    CHECK(Client(getpid()).hello().pid == static_cast<uint32_t>(getpid()));
}

}  // namespace

int main() {
    start_workload();
    {
        Client client(getpid());
        a_forked_child_is_left_alone(client);
    }
    the_deadline_opens();
    a_lost_client_opens();
    a_detached_hook_is_woken();
    bad_messages_end_only_the_connection();
    a_full_table_of_descriptors_is_waited_for();
    a_program_may_close_all_descriptors();
    closed_listeners_are_replaced_at_once();
    a_new_folder_gets_a_new_socket();
    what_was_closed_before_it_was_kept_is_not_ours();
    what_is_no_message_stays_where_it_is();
    numbers_that_are_the_programs_are_left_alone();
    std::puts("ok");
}

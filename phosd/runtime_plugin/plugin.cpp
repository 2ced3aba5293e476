// Loaded into the CRIU of a container's runtime (podman, runc, containerd, ...) as a plugin. Has
// phosd take GPU programs off their GPUs before CRIU saves them, and bring them back afterwards
// (phosd/service/tasks/runtime_checkpoints.py). One connection, on which each request waits for its
// answer:
//
//   pause PID, with CRIU's folder     before it holds anything: suspend the tree below PID
//   snapshot PID, with CRIU's folder  the same, of a tree that runs on: stop it for a checkpoint
//   save                              all is held: write the device memory into that folder, or,
//                                     if the tree runs on, make a place for it
//   end                               CRIU has saved the tree: is about to let it go, or to kill it
//   restored PID, with CRIU's folder  made anew, and held: it is a suspended program of phosd's
//   await                             the last: until the device memory is written, or the restored
//                                     program has its GPUs again
//
// The answer is a word; to `save` with the kinds of the GPU driver's devices behind it, which CRIU
// is to note, and phosd takes out of its files later. It is `nothing` if no process of the tree
// uses a GPU, or `error` and a text. To `snapshot` it is `frozen` if the runtime has frozen the
// tree before and thaws it after CRIU, as containerd does: it is suspended then. Where phosd does
// not answer, a checkpoint of a program without a GPU goes on, and any other fails; CRIU lets the
// program run on then.
//
// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "criu_abi.h"
#include "driver_devices.h"

// CRIU's own, which every one has that calls these hooks.
extern "C" {
__attribute__((weak)) int criu_get_image_dir(void);
extern __attribute__((weak)) int opts;  // begins with the state in which it leaves the tasks
// The plugins that an image names, without which CRIU does not restore it.
__attribute__((weak)) int add_inventory_plugin(const char* name);
__attribute__((weak)) bool check_and_remove_inventory_plugin(const char* name, size_t size);
__attribute__((weak, format(printf, 2, 3))) void print_on_level(unsigned level, const char* format,
                                                                ...);
}

namespace {

enum class Part { none, unneeded, paused, saved, snapshot, held, dumped, adopted, failed };

constexpr int kRunning = 1;  // CRIU's TASK_ALIVE

constexpr unsigned kError = 1;  // a level of CRIU's log
constexpr char kDefaultFolder[] = "/run/phos";
constexpr int kFolder = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
constexpr char kSaved[] = "phos-";  // begins the name of what phosd writes into CRIU's folder
constexpr char kName[] = "phos_runtime";

int peer = -1;
Part part = Part::none;
char devices[256];   // of the GPU driver, of a tree that phosd knows
bool named = false;  // by the image that is restored: it has device memory
bool ahead = false;  // of the dump, memory alone is saved
bool asked = false;  // phosd knows of this tree, or there is nothing to know
pid_t criu = 0;      // who asks; not the processes that it forks
char answer[4096];

constexpr size_t kMostTasks = 1 << 16;
int tasks[kMostTasks];  // that were restored
size_t task_count = 0;

// Keeps what has gone wrong as the answer, too.
void complain(const char* what) {
    if (what != answer) snprintf(answer, sizeof answer, "%s", what);
    if (print_on_level) print_on_level(kError, "phos: %s\n", what);
}

bool connect_to_phosd() {
    if (peer >= 0) return true;
    const char* folder = secure_getenv("PHOS_RUNTIME_DIR");
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/runtime.sock",
                                folder && *folder ? folder : kDefaultFolder);
    if (length < 0 || static_cast<size_t>(length) >= sizeof address.sun_path) return false;
    peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (peer >= 0 && connect(peer, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0)
        return true;
    if (peer >= 0) close(peer);
    peer = -1;
    return false;
}

bool send_request(const char* text, int folder) {
    iovec data{const_cast<char*>(text), strlen(text)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (folder >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof folder);
        memcpy(CMSG_DATA(header), &folder, sizeof folder);
    }
    return sendmsg(peer, &message, MSG_NOSIGNAL) >= 0;
}

// Returns the answer, which stays until the next request. An error was told to CRIU's log.
const char* ask(const char* text, int folder = -1) {
    snprintf(answer, sizeof answer, "error phosd has gone");
    if (peer >= 0 && send_request(text, folder)) {
        ssize_t size = -1;
        do size = recv(peer, answer, sizeof answer - 1, 0);
        while (size < 0 && errno == EINTR);
        if (size > 0)
            answer[size] = 0;
        else
            snprintf(answer, sizeof answer, "error phosd has gone");
    }
    if (strncmp(answer, "error", 5) == 0) complain(answer);
    return answer;
}

// Returns a failure of the hook, for an answer that is none of those that there are.
int unexpected(const char* said) {
    if (strncmp(said, "error", 5) != 0) complain(said);
    return -1;
}

bool is(const char* text, const char* word) {
    return strcmp(text, word) == 0;
}

const char* ask_about(const char* what, int pid) {
    char text[32];
    snprintf(text, sizeof text, "%s %d", what, pid);
    return ask(text, criu_get_image_dir ? criu_get_image_dir() : -1);
}

bool uses_cuda(int pid) {
    char line[4608];
    snprintf(line, sizeof line, "/proc/%d/maps", pid);
    FILE* maps = fopen(line, "re");
    bool found = false;
    while (maps && !found && fgets(line, sizeof line, maps))
        found = strstr(line, "/libcuda.so") != nullptr;
    if (maps) fclose(maps);
    return found;
}

// Whether phosd has saved device memory in CRIU's folder.
bool has_memory() {
    // Opened anew: the offset of a descriptor is CRIU's, too.
    const int folder = criu_get_image_dir ? openat(criu_get_image_dir(), ".", kFolder) : -1;
    DIR* entries = folder >= 0 ? fdopendir(folder) : nullptr;
    if (!entries) {
        if (folder >= 0) close(folder);
        return false;
    }
    bool found = false;
    for (const dirent* each = readdir(entries); each && !found; each = readdir(entries))
        found = strncmp(each->d_name, kSaved, sizeof kSaved - 1) == 0;
    closedir(entries);
    return found;
}

// Called for each process, the root first, before any is held.
int pause_devices(int pid) {
    if (ahead) {
        if (!uses_cuda(pid)) return 0;
        complain("error a program that uses a GPU is saved at once: without a pre-dump");
        return -1;
    }
    if (!asked) {
        asked = true;
        if (connect_to_phosd()) {
            bool runs_on = &opts && opts == kRunning;
            const char* said = ask_about(runs_on ? "snapshot" : "pause", pid);
            if (runs_on && is(said, "frozen")) {
                runs_on = false;
                said = ask_about("pause", pid);
            }
            if (is(said, "paused")) part = runs_on ? Part::snapshot : Part::paused;
            if (!is(said, "paused") && !is(said, "nothing")) return unexpected(said);
            if (is(said, "nothing")) part = Part::unneeded;
        }
    }
    if (part != Part::none || !uses_cuda(pid)) return 0;
    complain("error the program uses a GPU, and phosd does not answer: systemctl start phosd");
    return -1;
}

// Called for each process when all are held.
int checkpoint_devices(int) {
    if (part != Part::paused && part != Part::snapshot) return 0;
    const bool runs_on = part == Part::snapshot;
    const char* said = ask("save");
    const char* word = runs_on ? "noted" : "saved";
    if (strncmp(said, word, strlen(word)) != 0) return unexpected(said);
    if (const char* kinds = strchr(said, ' ')) snprintf(devices, sizeof devices, "%s", kinds + 1);
    if (add_inventory_plugin && add_inventory_plugin(kName)) return -1;
    part = runs_on ? Part::held : Part::saved;
    return 0;
}

// For a file that CRIU does not know.
int dump_file(int descriptor, int) {
    struct stat file;
    if (fstat(descriptor, &file) != 0) return -errno;
    return phos::criu::is_one_of(devices, file) ? 0 : -ENOTSUP;
}

int handle_mapping(int, const struct stat* file) {
    return phos::criu::is_one_of(devices, *file) ? 0 : -ENOTSUP;
}

// Called for each process, the root first, when all are made and held. CRIU goes on if it fails.
int resume_devices_late(int pid) {
    if (task_count < kMostTasks) tasks[task_count++] = pid;
    const bool here = !asked && has_memory();
    if (asked || !(here || named)) return 0;
    asked = true;
    part = Part::failed;
    if (!here)
        complain("error the image's folder lacks what phosd has saved in it (phos-...)");
    else if (!connect_to_phosd())
        complain("error the program's device memory is phosd's to load, which does not answer");
    else if (is(ask_about("restored", pid), "adopted"))
        part = Part::adopted;
    return part == Part::adopted ? 0 : -1;
}

int init(int stage) {
    criu = getpid();
    ahead = stage == phos::criu::kPreDump;
    // It says of an image that tells of no plugins that it names every one, again and again.
    const auto is_named = check_and_remove_inventory_plugin;
    if (stage == phos::criu::kRestore && is_named)
        named = is_named(kName, sizeof kName) && !is_named(kName, sizeof kName);
    return 0;
}

void end(int stage, int result) {
    if (stage != phos::criu::kDump || peer < 0) return;
    if (part == Part::saved && result == 0 && !is(ask("end"), "ended")) part = Part::failed;
    if (part != Part::snapshot && part != Part::held) return;
    if (result == 0 && part == Part::held && is(ask("end"), "ended")) {
        part = Part::dumped;
        return;
    }
    close(peer);  // the program is to run on at once, and what was copied is not needed
    peer = -1;
}

template <typename Function>
void* hook(Function* function) {
    return reinterpret_cast<void*>(function);
}

// The last that CRIU does. Its tasks run by now, and its answer was sent: the runtime waits for the
// exit, too. The library stays loaded until here (-z nodelete).
__attribute__((destructor)) void at_exit() {
    if (getpid() != criu) return;
    if (part == Part::dumped && !is(ask("await"), "saved")) {
        fprintf(stderr, "phos: %s\n", answer);
        _exit(1);
    }
    if (part == Part::failed || (part == Part::adopted && !is(ask("await"), "resumed"))) {
        fprintf(stderr, "phos: %s\n", answer);
        // The runtime takes the restore for failed, and leaves behind what is there.
        for (size_t i = 0; i < task_count; ++i) kill(tasks[i], SIGKILL);
        _exit(1);
    }
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) phos::criu::Plugin CR_PLUGIN_DESC = {
    kName,
    init,
    end,
    phos::criu::kVersion,
    phos::criu::kHooks,
    {nullptr, nullptr, hook(dump_file), nullptr, nullptr, nullptr, nullptr, hook(handle_mapping),
     nullptr, hook(resume_devices_late), hook(pause_devices), hook(checkpoint_devices)},
};
}

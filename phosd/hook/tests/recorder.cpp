// In the place of copy-on-write in a hook that always believes itself armed: writes down what was
// predicted for each submission, where a test compares it with what the software GPU then wrote.
//
// Compiled with `cow` renamed, as those are that call it. Before each submission it waits for the
// devices, so that a trace in the same file stands between its submission and the next one: for
// programs of one thread whose kernels wait for nobody.
//
// PHOS_TEST_PREDICTIONS: the file, which gets one JSON object a submission: "predicted" ranges,
// "everything", "synchronous", and "blocks", all the memory that the hook owns.
// PHOS_TEST_KERNELS: a file of board::KernelRow to arm with.
// PHOS_TEST_TABLE: a file with the table of a module.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "code/kernels.h"
#include "cow/cow.h"
#include "memory/blocks.h"
#include "memory/contexts.h"

namespace phos::cow {

std::atomic<bool> armed{true};

namespace {

struct Line {
    std::string predicted;
    bool everything = false;
    bool synchronous = false;
};
thread_local Line line;

void append(std::string* list, uint64_t begin, uint64_t end) {
    *list +=
        (list->empty() ? "[" : ", [") + std::to_string(begin) + ", " + std::to_string(end) + "]";
}

void arm_once() {
    static const bool done = [] {
        std::vector<board::KernelRow> rows;
        if (const char* path = std::getenv("PHOS_TEST_KERNELS")) {
            const int file = open(path, O_RDONLY | O_CLOEXEC);
            board::KernelRow row;
            while (file >= 0 && read(file, &row, sizeof row) == sizeof row) rows.push_back(row);
            if (rows.empty()) std::abort();
            close(file);
        }
        kernels::arm(rows.data(), rows.size());
        if (const char* path = std::getenv("PHOS_TEST_TABLE")) {
            const int file = open(path, O_RDONLY | O_CLOEXEC);
            uint64_t module = 0;
            if (file < 0 || summaries::add(file, &module).status != wire::Status::ok) std::abort();
            close(file);
            kernels::summarise(module);
        }
        return true;
    }();
    static_cast<void>(done);
}

void wait_for_devices() {
    if (contexts::captures()) return;
    for (int device = 0; device < static_cast<int>(board::kMaxDevices); ++device) {
        CUcontext const context = contexts::any_on(device);
        if (!context) continue;
        const Current current(context);
        if (current) driver.cuCtxSynchronize();
    }
}

}  // namespace

SubmissionScope::SubmissionScope() : began_(0) {
    arm_once();
    wait_for_devices();
    line = Line{};
}

SubmissionScope::~SubmissionScope() {
    const char* path = std::getenv("PHOS_TEST_PREDICTIONS");
    if (!path) return;
    std::string owned;
    {
        const std::lock_guard lock(blocks::mutex);
        for (const auto& [address, mapping] : blocks::by_address)
            append(&owned, address, address + mapping.size);
    }
    const std::string text = "{\"predicted\": [" + line.predicted +
                             "], \"everything\": " + (line.everything ? "true" : "false") +
                             ", \"synchronous\": " + (line.synchronous ? "true" : "false") +
                             ", \"blocks\": [" + owned + "]}\n";
    const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0 || write(file, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
        std::abort();
    close(file);
}

bool extent_of(uint64_t address, Range* extent) {
    const std::lock_guard lock(blocks::mutex);
    const auto* found = blocks::find(address);
    if (!found) return false;
    *extent = {found->first, found->first + found->second.size};
    return true;
}

void before_write(const Range* ranges, size_t count, const Where& where) {
    line.synchronous = where.synchronous;
    for (size_t i = 0; i < count; ++i) append(&line.predicted, ranges[i].begin, ranges[i].end);
}

void before_writing_everything(const Where& where) {
    line.synchronous = where.synchronous;
    line.everything = true;
}

}  // namespace phos::cow

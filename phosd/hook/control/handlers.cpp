#include "control/handlers.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/descriptors.h"
#include "base/faults.h"
#include "base/log.h"
#include "base/process.h"
#include "code/images.h"
#include "code/kernels.h"
#include "code/summaries.h"
#include "control/hello.h"
#include "control/safe_points.h"
#include "control/torch_cache.h"
#include "cow/session.h"
#include "gate/gate.h"
#include "intercept/stream_pools.h"
#include "intercept/unsupported.h"
#include "memory/contexts.h"
#include "park/quiesce.h"
#include "park/reexport.h"

namespace phos::handlers {
namespace {

using channel::Message;
using wire::State;
using wire::Status;

uint64_t count_until = 0;  // nanoseconds, CLOCK_MONOTONIC; only the hook's thread uses it

template <class T>
bool read(const Message& message, T* value) {
    if (message.payload.size() < sizeof *value) return false;
    std::memcpy(value, message.payload.data(), sizeof *value);
    return true;
}

// Reads a Count and as many ids.
bool read_ids(const Message& request, std::vector<uint64_t>* ids) {
    wire::Count header{};
    if (!read(request, &header) || header.count > wire::kMaxPayload ||
        request.payload.size() != sizeof header + header.count * sizeof(uint64_t))
        return false;
    ids->resize(header.count);
    std::memcpy(ids->data(), request.payload.data() + sizeof header,
                header.count * sizeof(uint64_t));
    return true;
}

template <class Fields>
struct Row {
    Fields fields;
    const std::string& text;
};

// Lists as many rows as fit into a message: `row_of` returns that of an item, whose text follows
// its fields.
template <class Head, class Item, class RowOf>
Reply listed(Item at, Item end, RowOf row_of) {
    Head head{};
    Reply rows;
    for (; at != end; ++at) {
        auto [fields, text] = row_of(*at);
        fields.length = static_cast<uint32_t>(std::min<size_t>(text.size(), wire::kMaxName));
        head.more =
            sizeof head + rows.payload.size() + sizeof fields + fields.length > wire::kMaxPayload;
        if (head.more) break;
        rows.append(fields);
        rows.append(text.data(), fields.length);
        ++head.count;
    }
    Reply reply;
    reply.append(head);
    reply.append(rows.payload.data(), rows.payload.size());
    return reply;
}

}  // namespace

Reply hello(bool never_stopped) {
    const HelloReply said = make_hello(never_stopped);
    Reply reply;
    reply.append(said.hello);
    reply.append(said.devices.data(), said.devices.size() * sizeof(wire::DeviceId));
    return reply;
}

Reply list_blocks(const Message& request, bool with_descriptors) {
    wire::Cursor cursor{};
    if (!read(request, &cursor)) return {Status::bad_message, "the cursor is missing"};
    if (with_descriptors) stream_pools::give_back_all();
    const park::Listing listing = park::list(cursor.after, with_descriptors);
    if (listing.outcome.status != Status::ok) {
        for (const int descriptor : listing.descriptors) descriptors::release(descriptor);
        return Reply(listing.outcome);
    }
    Reply reply;
    reply.append(listing.head);
    reply.append(listing.blocks.data(), listing.blocks.size() * sizeof(wire::Block));
    reply.descriptors = listing.descriptors;
    return reply;
}

Reply close_gate(const Message& request) {
    wire::CloseGate wanted{};
    if (!read(request, &wanted)) return {Status::bad_message, "the deadline is missing"};
    Reply too_late(Status::busy,
                   "the program could not be brought to rest before the deadline, and runs on");
    if (gate::take_expired()) return too_late;
    if (gate::state() == State::running) {
        if (const CUresult fault = faults::point(faults::Point::close_gate); fault != CUDA_SUCCESS)
            return {Status::driver, std::string("closing failed with ") + error_name(fault)};
        // Not inside the stop, when a thread may hold the loader's lock.
        note_libraries();
        stream_pools::give_back_all();
        quiesce::begin();
    }
    if (!gate::close(wanted.deadline_ms))
        return {Status::unsupported,
                "the kernel refuses membarrier(2), without which the gate "
                "cannot be closed on running threads"};
    const wire::GateState state =
        quiesce::advance(wanted.slice_us * uint64_t{1000}, wanted.for_peers);
    if (gate::take_expired()) return too_late;
    Reply reply;
    reply.append(state);
    return reply;
}

Reply seal_gate() {
    const int inside = gate::seal();
    if (inside < 0)
        return {Status::unsupported,
                "the kernel refuses membarrier(2), without which the gate "
                "cannot be sealed on running threads"};
    Reply reply;
    reply.append(wire::Count{static_cast<uint64_t>(inside)});
    return reply;
}

Reply park_all() {
    if (cow::armed.load())
        return {Status::wrong_state, "copy-on-write is armed; disarm it before parking"};
    const Fitness fit = fitness();
    if (!fit.parkable) return {Status::unsupported, fit.reason};
    const Outcome outcome = park::park();
    if (outcome.status == Status::ok) {
        contexts::release_stacks();
        gate::set_parked(true);
    }
    return Reply(outcome);
}

Reply hand_back(Message& request) {
    std::vector<uint64_t> ids;
    if (!read_ids(request, &ids) || ids.size() != request.descriptors.size())
        return {Status::bad_message, "the ids and the descriptors are not of one number"};
    return Reply(park::hand_back(ids.data(), ids.size(), request.descriptors));
}

Reply make_blocks(const Message& request) {
    std::vector<uint64_t> ids;
    if (!read_ids(request, &ids) || ids.size() > wire::kMaxDescriptors)
        return {Status::bad_message, "the ids are not of their number, or too many"};
    std::vector<int> descriptors;
    const Outcome outcome = park::make(ids, &descriptors);
    Reply reply(outcome);
    if (outcome.status == Status::ok)
        reply.descriptors = std::move(descriptors);
    else
        for (const int descriptor : descriptors) descriptors::release(descriptor);
    return reply;
}

Reply blocks_filled(const Message& request, bool renewed) {
    std::vector<uint64_t> ids;
    if (!read_ids(request, &ids)) return {Status::bad_message, "the ids are not of their number"};
    return Reply(park::filled(ids, renewed));
}

Reply reexport_blocks(const Message& request) {
    std::vector<uint64_t> ids;
    if (request.payload.empty()) return Reply(reexport::all());
    if (!read_ids(request, &ids)) return {Status::bad_message, "the ids are not of their number"};
    return Reply(reexport::some({ids.begin(), ids.end()}));
}

Reply arm(int client, const Message& request) {
    wire::Arm wanted{};
    if (!read(request, &wanted) || request.descriptors.size() != wanted.slabs + 1ull)
        return {Status::bad_message, "the board and the slabs do not come with a descriptor each"};
    return Reply(cow::arm(client, request.descriptors));
}

Reply disarm() {
    return Reply(cow::disarm());
}

Reply forget() {
    const Outcome outcome = cow::forget();
    return outcome.status == Status::ok ? Reply() : Reply(outcome);
}

Reply list_kernels(const Message& request) {
    wire::Cursor cursor{};
    if (!read(request, &cursor)) return {Status::bad_message, "the cursor is missing"};
    const std::vector<const kernels::Kernel*> all = kernels::launched();
    const auto first = all.begin() + static_cast<ptrdiff_t>(std::min(cursor.after, all.size()));
    return listed<wire::KernelList>(first, all.end(), [](const kernels::Kernel* kernel) {
        const wire::Kernel row{kernel->module, kernel->launches.load(), kernel->flags.load(), 0};
        return Row<wire::Kernel>{row, kernel->name};
    });
}

Reply list_launches(const Message& request) {
    wire::LaunchesAsk wanted{};
    if (!read(request, &wanted)) return {Status::bad_message, "what is wanted is missing"};
    if (wanted.seconds) {
        // What is counted for a checkpoint goes on.
        if (!kernels::counting.load() && !cow::armed.load()) kernels::count_afresh();
        count_until = monotonic_ns() + wanted.seconds * 1'000'000'000ull;
        kernels::counting.store(true);
    }
    const std::vector<const kernels::Kernel*> all = kernels::launched();
    const auto first = all.begin() + static_cast<ptrdiff_t>(std::min(wanted.after, all.size()));
    return listed<wire::KernelList>(first, all.end(), [](const kernels::Kernel* kernel) {
        const summaries::Summary* const summary = kernel->summary.load(std::memory_order_acquire);
        const uint32_t flags = kernel->flags.load() | (summary ? wire::kAnalysed : 0u) |
                               (kernel->guessed.load() ? wire::kGuessed : 0u);
        const wire::LaunchedKernel row{kernel->module,
                                       kernel->launches.load(),
                                       kernel->verdicts[kernels::kIdempotent].load(),
                                       kernel->verdicts[kernels::kOverwrites].load(),
                                       flags,
                                       summary ? summary->row->flags : 0,
                                       0,
                                       0};
        return Row<wire::LaunchedKernel>{row, kernel->name};
    });
}

void tidy() {
    if (kernels::counting.load() && monotonic_ns() >= count_until) stop_counting();
}

void stop_counting() {
    kernels::counting.store(false);
}

Reply list_images(const Message& request) {
    wire::Cursor cursor{};
    if (!read(request, &cursor)) return {Status::bad_message, "the cursor is missing"};
    const std::vector<images::Image> all = images::after(cursor.after);
    return listed<wire::ImageList>(all.begin(), all.end(), [](const images::Image& image) {
        const wire::Image row{image.hash, image.address, image.size,
                              static_cast<uint32_t>(image.held), 0};
        return Row<wire::Image>{row, image.path};
    });
}

Reply take_summaries(const Message& request) {
    if (request.descriptors.size() != 1)
        return {Status::bad_message, "the table does not come with one descriptor"};
    uint64_t module = 0;
    const Outcome outcome = summaries::add(request.descriptors[0], &module);
    if (outcome.status == Status::ok) kernels::summarise(module);
    return Reply(outcome);
}

Reply empty_cache(const Message& request) {
    wire::EmptyCache wanted{};
    if (!read(request, &wanted)) return {Status::bad_message, "what is wanted is missing"};
    Reply reply;
    reply.append(wanted.ask ? torch_cache::release() : torch_cache::state());
    return reply;
}

Reply program(int client, const Message& request) {
    wire::ProgramAsk wanted{};
    if (!read(request, &wanted) || wanted.ask > static_cast<uint32_t>(wire::Ask::pass))
        return {Status::bad_message, "what is wanted of the program is missing"};
    if (wanted.ask == static_cast<uint32_t>(wire::Ask::want)) safe_points::want(client);
    if (wanted.ask == static_cast<uint32_t>(wire::Ask::answer)) safe_points::answer(wanted);
    if (wanted.ask == static_cast<uint32_t>(wire::Ask::pass)) safe_points::pass();
    Reply reply;
    reply.append(safe_points::state());
    return reply;
}

// A Landlock domain lets a process look only at what is in it; nothing else tells of one.
Reply may_see(const Message& request) {
    wire::Cursor other{};
    if (!read(request, &other)) return {Status::bad_message, "the pid is missing"};
    char path[40];
    std::snprintf(path, sizeof path, "/proc/%lu/exe", static_cast<unsigned long>(other.after));
    char target[1];
    const ssize_t got = readlink(path, target, sizeof target);
    Reply reply;
    reply.append(wire::Count{got < 0 ? static_cast<uint64_t>(errno) : 0});
    return reply;
}

Reply unfinished() {
    const uint64_t since = contexts::unfinished_since();
    const uint64_t milliseconds = since ? (monotonic_ns() - since) / 1'000'000 + 1 : 0;
    Reply reply;
    reply.append(wire::Count{milliseconds});
    return reply;
}

Reply unpark_all() {
    const Outcome outcome = park::unpark();
    if (outcome.status == Status::ok) {
        contexts::restore_stacks();
        gate::set_parked(false);
    }
    return Reply(outcome);
}

Reply stats() {
    const gate::View view = gate::view();
    uint64_t last_id = 0;
    uint64_t freed = 0;
    park::newest(&last_id, &freed);
    char head[256];
    std::snprintf(head, sizeof head,
                  "state %u\nthreads inside %u\nthreads waiting %u\nadmitted %lu\ncaptures %u\n"
                  "newest block %lu\nblocks freed %lu\ndescriptors kept %u\n",
                  static_cast<unsigned>(view.state), view.inside, view.waiting,
                  static_cast<unsigned long>(view.admitted), contexts::captures(),
                  static_cast<unsigned long>(last_id), static_cast<unsigned long>(freed),
                  descriptors::count());
    Reply reply;
    reply.append(head, std::strlen(head));
    const std::string lines = log::text();
    reply.append(lines.data(), lines.size());
    return reply;
}

}  // namespace phos::handlers

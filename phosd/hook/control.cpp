#include "control.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "channel.h"
#include "contexts.h"
#include "cow.h"
#include "descriptors.h"
#include "driver.h"
#include "gate.h"
#include "hook.h"
#include "introduction.h"
#include "ipc.h"
#include "kernels.h"
#include "log.h"
#include "park.h"
#include "quiesce.h"
#include "rehome.h"
#include "session.h"

namespace phos::control {
namespace {

using channel::Message;
using wire::State;
using wire::Status;
using wire::Type;

constexpr size_t kMaxClients = 8;
constexpr int kNoClient = -1;

// Everything here belongs to the hook's thread.
std::string folder;
int listener = -1;
std::vector<int> clients;
int gate_owner = kNoClient;  // the client whose loss opens the gate
bool detached = false;

struct Reply {
    Status status = Status::ok;
    std::vector<unsigned char> payload;
    std::vector<int> descriptors;  // sent, then released

    Reply() = default;
    Reply(Status failed, const std::string& text) : status(failed) {
        append(text.data(), text.size());
    }
    explicit Reply(const park::Outcome& outcome) : status(outcome.status) {
        if (status == Status::ok)
            append(wire::Count{outcome.count});
        else
            append(outcome.text.data(), outcome.text.size());
    }
    void append(const void* bytes, size_t size) {
        const auto* first = static_cast<const unsigned char*>(bytes);
        payload.insert(payload.end(), first, first + size);
    }
    template <class T>
    void append(const T& value) {
        append(&value, sizeof value);
    }
};

template <class T>
bool read(const Message& message, T* value) {
    if (message.payload.size() < sizeof *value) return false;
    std::memcpy(value, message.payload.data(), sizeof *value);
    return true;
}

std::string path_of(const char* suffix) {
    return folder + "/" + std::to_string(getpid()) + suffix;
}

Reply hello() {
    const Introduction said = introduce();
    Reply reply;
    reply.append(said.hello);
    reply.append(said.devices.data(), said.devices.size() * sizeof(wire::DeviceId));
    return reply;
}

Reply list_blocks(const Message& request, bool with_descriptors) {
    wire::Cursor cursor{};
    if (!read(request, &cursor)) return {Status::bad_message, "the cursor is missing"};
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
    const Reply too_late(
        Status::busy, "the program could not be brought to rest before the deadline, and runs on");
    if (gate::take_expired()) return too_late;
    if (gate::state() == State::running) quiesce::begin();
    if (!gate::close(wanted.deadline_ms))
        return {Status::unsupported,
                "the kernel refuses membarrier(2), without which the gate "
                "cannot be closed on running threads"};
    const wire::GateState state = quiesce::advance(wanted.peers_busy != 0);
    if (gate::take_expired()) return too_late;
    Reply reply;
    reply.append(state);
    return reply;
}

Reply park_all() {
    if (cow::armed.load())
        return {Status::wrong_state, "copy-on-write is armed; disarm it before parking"};
    const Fitness fit = fitness();
    if (!fit.parkable) return {Status::unsupported, fit.reason};
    const park::Outcome outcome = park::park();
    if (outcome.status == Status::ok) {
        contexts::release_stacks();
        gate::set_parked(true);
    }
    return Reply(outcome);
}

// A Count and as many ids.
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

Reply hand_back(Message& request) {
    std::vector<uint64_t> ids;
    if (!read_ids(request, &ids) || ids.size() != request.descriptors.size())
        return {Status::bad_message, "the ids and the descriptors are not of one number"};
    return Reply(park::hand_back(ids.data(), ids.size(), request.descriptors));
}

Reply rehome_blocks(const Message& request) {
    std::vector<uint64_t> ids;
    if (request.payload.empty()) return Reply(rehome::all());
    if (!read_ids(request, &ids)) return {Status::bad_message, "the ids are not of their number"};
    return Reply(rehome::some({ids.begin(), ids.end()}));
}

Reply arm(int client, const Message& request) {
    wire::Arm wanted{};
    if (!read(request, &wanted) || request.descriptors.size() != wanted.slabs + 1ull)
        return {Status::bad_message, "the board and the slabs do not come with a descriptor each"};
    return Reply(cow::arm(client, request.descriptors));
}

Reply list_kernels(const Message& request) {
    wire::Cursor cursor{};
    if (!read(request, &cursor)) return {Status::bad_message, "the cursor is missing"};
    const std::vector<const kernels::Kernel*> all = kernels::launched();
    wire::KernelList head{};
    Reply rows;
    for (uint64_t i = cursor.after; i < all.size(); ++i) {
        const kernels::Kernel& kernel = *all[i];
        const wire::Kernel row{
            kernel.module, kernel.launches.load(), kernel.flags.load(),
            static_cast<uint32_t>(std::min<size_t>(kernel.name.size(), wire::kMaxName))};
        head.more = sizeof head + rows.payload.size() + sizeof row + row.length > wire::kMaxPayload;
        if (head.more) break;
        rows.append(row);
        rows.append(kernel.name.data(), row.length);
        ++head.count;
    }
    Reply reply;
    reply.append(head);
    reply.append(rows.payload.data(), rows.payload.size());
    return reply;
}

Reply unpark_all() {
    const park::Outcome outcome = park::unpark();
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

// One request that needs the gate in `needed`, or a reply that says so.
bool in_state(State needed, Reply* refusal) {
    static const char* const names[] = {"running", "closing", "closed", "parked"};
    const State state = gate::state();
    if (state == needed) return true;
    *refusal = {Status::wrong_state, std::string("the process is ") +
                                         names[static_cast<unsigned>(state)] + ", not " +
                                         names[static_cast<unsigned>(needed)]};
    return false;
}

Reply answer(int client, Message& request) {
    const Type type = static_cast<Type>(request.header.type);
    Reply refusal;
    switch (type) {
        case Type::hello:
            return hello();
        case Type::list_blocks:
            return list_blocks(request, false);
        case Type::stats:
            return stats();
        default:
            break;
    }
    if (type < Type::hello || type > Type::kernels) return {Status::bad_message, "unknown request"};
    const std::lock_guard turn(quiesce::turn);
    if (gate_owner != kNoClient && gate_owner != client)
        return {Status::wrong_state, "another client holds the gate of this process"};
    const bool parked = gate::state() == State::parked;
    switch (type) {
        case Type::export_blocks:
            if (parked) return {Status::wrong_state, "the memory is parked"};
            return list_blocks(request, true);
        case Type::close_gate:
            if (parked) return {Status::wrong_state, "the memory is parked"};
            gate_owner = client;
            return close_gate(request);
        case Type::park:
            if (!in_state(State::closed, &refusal)) return refusal;
            gate_owner = client;
            return park_all();
        case Type::unpark_blocks:
            if (!in_state(State::parked, &refusal)) return refusal;
            gate_owner = client;
            return hand_back(request);
        case Type::unpark:
            if (!in_state(State::parked, &refusal)) return refusal;
            gate_owner = client;
            return unpark_all();
        case Type::rehome:
            if (!in_state(State::closed, &refusal)) return refusal;
            gate_owner = client;
            return rehome_blocks(request);
        case Type::arm:
            if (!in_state(State::closed, &refusal)) return refusal;
            gate_owner = client;
            return arm(client, request);
        case Type::disarm:
            return Reply(cow::disarm());
        case Type::forget: {
            const park::Outcome outcome = cow::forget();
            return outcome.status == Status::ok ? Reply() : Reply(outcome);
        }
        case Type::kernels:
            return list_kernels(request);
        case Type::open_gate:
            if (parked) return {Status::wrong_state, "the memory is parked"};
            gate::open();
            gate_owner = kNoClient;
            return {};
        default:
            return {};  // detach: done by the caller, after the reply
    }
}

void drop(int client) {
    for (auto at = clients.begin(); at != clients.end(); ++at)
        if (*at == client) {
            clients.erase(at);
            break;
        }
    descriptors::release(client);
    cow::client_lost(client);
    if (client != gate_owner) return;
    const std::lock_guard turn(quiesce::turn);
    gate_owner = kNoClient;
    const State state = gate::state();
    if (state == State::closing || state == State::closed) {
        log::note("the client was lost while the gate was closed: opened");
        gate::open();
    }
}

void stop_listening() {
    if (listener < 0) return;
    unlink(path_of(".sock").c_str());
    descriptors::release(listener);
    listener = -1;
}

// Leaves nothing but the connection that the answer goes to, which is closed next.
void detach(int client) {
    gate_owner = kNoClient;  // the state stays as it is
    detached = true;
    for (const int other : clients)
        if (other != client) descriptors::release(other);
    clients.assign(1, client);
    stop_listening();
    ipc::detach();
    if (cow::forget().status != Status::ok) log::note("detached with a board that is in use");
}

// False when the connection is over.
bool serve(int client) {
    Message request;
    const bool whole = channel::receive(client, &request);
    Reply reply = whole ? answer(client, request) : Reply(Status::bad_message, "not a request");
    for (const int descriptor : request.descriptors)
        if (descriptor >= 0) descriptors::release(descriptor);
    wire::Header header{wire::kMagic,
                        wire::kVersion,
                        static_cast<uint16_t>(request.header.type | wire::kReply),
                        request.header.sequence,
                        static_cast<uint32_t>(reply.status),
                        static_cast<uint32_t>(reply.payload.size()),
                        static_cast<uint32_t>(reply.descriptors.size())};
    if (whole && reply.status == Status::ok &&
        request.header.type == static_cast<uint16_t>(Type::detach))
        detach(client);
    const bool sent =
        whole && channel::send(client, header, reply.payload.data(), reply.descriptors);
    for (const int descriptor : reply.descriptors) descriptors::release(descriptor);
    return sent && !detached && reply.status != Status::bad_message;
}

void try_listen() {
    // A folder of somebody else's could be swapped at will; /run/phos/hook is root's.
    struct stat info{};
    if (lstat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
        (info.st_uid != 0 && info.st_uid != geteuid()))
        return;
    listener = channel::listen_at(path_of(".sock"));
    static int last_error = 0;
    if (listener < 0 && errno != last_error) {
        last_error = errno;
        log::note("cannot listen at %s: %s", path_of(".sock").c_str(), std::strerror(last_error));
    }
}

bool woken() {
    struct stat info{};
    return lstat(path_of(".wake").c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
           (info.st_uid == 0 || info.st_uid == geteuid());
}

void wait_until_woken() {
    while (!woken()) {
        const timespec pause{0, 1'000'000};
        nanosleep(&pause, nullptr);
    }
    detached = false;
    ipc::attach();
}

void serve_once() {
    if (detached) wait_until_woken();
    if (listener < 0) try_listen();
    cow::tidy();
    std::vector<pollfd> watched{{listener, POLLIN, 0}, {ipc::listener(), POLLIN, 0}};
    for (const int client : clients) watched.push_back({client, POLLIN, 0});
    // A closing gate's deadline is looked at even when no client calls.
    const int patience = gate::state() == State::closing ? 20 : 1000;
    if (poll(watched.data(), watched.size(), patience) <= 0) return;
    if (watched[1].revents) ipc::serve();
    for (size_t i = 2; i < watched.size() && !detached; ++i)
        if (watched[i].revents && !serve(watched[i].fd)) drop(watched[i].fd);
    if (detached || !watched[0].revents) return;
    const int client = channel::accept_from(listener, nullptr);
    if (client < 0) return;
    if (clients.size() < kMaxClients)
        clients.push_back(client);
    else
        descriptors::release(client);
}

void* run(void*) {
    prctl(PR_SET_NAME, "phos-hook");
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (driver.cuThreadExchangeStreamCaptureMode) driver.cuThreadExchangeStreamCaptureMode(&mode);
    for (;;) serve_once();
    return nullptr;
}

}  // namespace

void start() {
    const char* runtime = secure_getenv("PHOS_RUNTIME_DIR");
    folder = std::string(runtime && *runtime ? runtime : "/run/phos") + "/hook";
    ipc::attach();
    // The thread takes none of the program's signals.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    if (pthread_create(&thread, &attributes, run, nullptr) != 0)
        log::note("the hook's thread could not be started: no checkpoints of this process");
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace phos::control

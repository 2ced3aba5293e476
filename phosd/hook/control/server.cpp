#include "control/server.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/channel.h"
#include "base/descriptors.h"
#include "base/driver.h"
#include "base/faults.h"
#include "base/log.h"
#include "base/process.h"
#include "control/closing_pipe.h"
#include "control/handlers.h"
#include "control/phosd_socket.h"
#include "control/safe_points.h"
#include "control/socket_folder.h"
#include "cow/session.h"
#include "gate/gate.h"
#include "intercept/legacy_ipc.h"
#include "memory/shared_events.h"
#include "park/quiesce.h"
#include "ranges/launch_ranges.h"

namespace phos::control {
namespace {

using channel::Message;
using handlers::Reply;
using wire::State;
using wire::Status;
using wire::Type;

constexpr size_t kMaxClients = 8;
constexpr int kNoClient = -1;
constexpr int kRefining = 10;  // milliseconds between launches that are computed again
constexpr int kDeaf = 100;     // milliseconds without new connections after accepting one failed
constexpr int kWary = 20;  // milliseconds between two checks while the program closes descriptors

// Everything here is used only by the hook's thread.
int listener = -1;
std::vector<int> clients;
int gate_owner = kNoClient;  // if this client is lost, the gate opens
bool detached = false;
bool never_stopped = true;  // parked or detached; part of the image, too
uint64_t deaf_until = 0;    // nanoseconds, CLOCK_MONOTONIC
uint64_t wary_until = 0;    // until then it looks often for what the program or phosd does

// Checks that the gate is in state `needed` for a request; if not, sets the refusal.
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
            return handlers::hello(never_stopped);
        case Type::list_blocks:
            return handlers::list_blocks(request, false);
        case Type::stats:
            return handlers::stats();
        case Type::may_see:
            return handlers::may_see(request);
        case Type::program:
            return handlers::program(client, request);
        case Type::images:
            return handlers::list_images(request);
        case Type::launches:
            return handlers::list_launches(request);
        case Type::summaries:
            return handlers::take_summaries(request);
        case Type::unfinished:
            return handlers::unfinished();
        default:
            break;
    }
    if (type < Type::hello || type > Type::unfinished)
        return {Status::bad_message, "unknown request"};
    const std::lock_guard turn(quiesce::turn);
    if (gate_owner != kNoClient && gate_owner != client)
        return {Status::wrong_state, "another client holds the gate of this process"};
    const bool parked = gate::state() == State::parked;
    switch (type) {
        case Type::export_blocks:
            if (parked) return {Status::wrong_state, "the memory is parked"};
            return handlers::list_blocks(request, true);
        case Type::close_gate:
            if (parked) return {Status::wrong_state, "the memory is parked"};
            gate_owner = client;
            return handlers::close_gate(request);
        case Type::seal_gate:
            if (!in_state(State::closed, &refusal)) return refusal;
            gate_owner = client;
            return handlers::seal_gate();
        case Type::park:
            if (!in_state(State::closed, &refusal)) return refusal;
            gate_owner = client;
            return handlers::park_all();
        case Type::unpark_blocks:
            if (!in_state(State::parked, &refusal)) return refusal;
            gate_owner = client;
            return handlers::hand_back(request);
        case Type::make_blocks:
            if (!in_state(State::parked, &refusal)) return refusal;
            gate_owner = client;
            return handlers::make_blocks(request);
        case Type::blocks_filled:
        case Type::blocks_renewed:
            if (!in_state(State::parked, &refusal)) return refusal;
            gate_owner = client;
            return handlers::blocks_filled(request, type == Type::blocks_renewed);
        case Type::unpark:
            if (!in_state(State::parked, &refusal)) return refusal;
            gate_owner = client;
            return handlers::unpark_all();
        case Type::rehome:
            if (!in_state(State::closed, &refusal)) return refusal;
            gate_owner = client;
            return handlers::reexport_blocks(request);
        case Type::arm:
            if (parked) return {Status::wrong_state, "the memory is parked"};
            return handlers::arm(client, request);
        case Type::disarm:
            return handlers::disarm();
        case Type::forget:
            return handlers::forget();
        case Type::kernels:
            return handlers::list_kernels(request);
        case Type::empty_cache:
            if (!in_state(State::running, &refusal)) return refusal;
            return handlers::empty_cache(request);
        case Type::open_gate:
            if (parked) return {Status::wrong_state, "the memory is parked"};
            if (const CUresult fault = faults::point(faults::Point::open_gate);
                fault != CUDA_SUCCESS)
                return {Status::driver, std::string("opening failed with ") + error_name(fault)};
            gate::open();
            gate_owner = kNoClient;
            safe_points::gate_opened();
            return {};
        case Type::detach:  // the rest is done by the caller, after the reply
            if (safe_points::detach()) return {};
            return {Status::busy, "a thread of the program is talking to phosd"};
        default:
            return {Status::bad_message, "unknown request"};
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
    if (client == gate_owner) {
        const std::lock_guard turn(quiesce::turn);
        gate_owner = kNoClient;
        const State state = gate::state();
        if (state == State::closing || state == State::closed) {
            log::note("the client was lost while the gate was closed: opened");
            gate::open();
        }
    }
    safe_points::client_lost(client);
}

void stop_listening() {
    if (listener < 0) return;
    unlink(socket_folder::path_of(".sock").c_str());
    descriptors::release(listener);
    listener = -1;
}

// Closes everything but the connection that the answer goes to, which is closed next.
void detach(int client) {
    gate_owner = kNoClient;  // the state stays unchanged
    detached = true;
    for (const int other : clients)
        if (other != client) descriptors::release(other);
    clients.assign(1, client);
    stop_listening();
    legacy_ipc::detach();
    closing_pipe::remove();
    handlers::stop_counting();  // its time is the machine's
    if (cow::forget().status != Status::ok) log::note("detached with a board that is in use");
}

// Serves one request. False if the connection has ended.
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
    const auto type = static_cast<Type>(request.header.type);
    const bool done = whole && reply.status == Status::ok;
    if (done && type == Type::park) safe_points::stopped();
    if (done && (type == Type::park || type == Type::detach)) never_stopped = false;
    if (done && type == Type::detach) detach(client);
    const bool sent = whole && !faults::take_short() &&
                      channel::send(client, header, reply.payload.data(), reply.descriptors);
    for (const int descriptor : reply.descriptors) descriptors::release(descriptor);
    return sent && !detached && reply.status != Status::bad_message;
}

void try_listen() {
    if (!socket_folder::find()) {
        static uint64_t next_call = 0;
        const uint64_t now = monotonic_ns();
        if (now < next_call) return;
        next_call = now + 1'000'000'000;
        if (phosd_socket::call()) wary_until = now + 200'000'000;
        return;
    }
    listener = channel::listen_at(socket_folder::path_of(".sock"));
    static int last_error = 0;
    if (listener < 0 && errno != last_error) {
        last_error = errno;
        log::note("cannot listen at %s: %s", socket_folder::path_of(".sock").c_str(),
                  std::strerror(last_error));
    }
}

// Whoever removes phosd removes its folder of sockets from below the programs, which run on, and a
// phosd that is installed later looks into a new one; a program that has become another user has
// another one. The old socket stays as long as no new one can be made: a program that has changed
// its root does not see the folder, where phosd still finds its socket.
void follow_the_folder() {
    if (listener < 0 || !socket_folder::find() || !socket_folder::lacks_socket()) return;
    const int before = std::exchange(listener, -1);
    try_listen();
    if (listener < 0)
        listener = before;
    else
        descriptors::release(before);
}

void wait_until_woken() {
    while (!socket_folder::woken()) pause_for(1'000'000);
    detached = false;
    safe_points::awake();
}

// Creates again what the program has closed, as a program does that becomes a daemon.
void let_go_of_closed() {
    const auto is_closed = [](int descriptor) {
        return descriptor >= 0 && !descriptors::is_ours(descriptor);
    };
    bool any = closing_pipe::remove_closed();
    if (is_closed(legacy_ipc::listener())) {
        legacy_ipc::detach();
        any = true;
    }
    if (is_closed(listener)) {
        descriptors::release(listener);
        listener = -1;
        any = true;
    }
    for (const int client : std::vector<int>(clients))
        if (is_closed(client)) {
            drop(client);
            any = true;
        }
    if (any) wary_until = monotonic_ns() + 1'000'000'000;  // it may go on closing for a while
}

void open_what_is_missing() {
    closing_pipe::make();
    if (legacy_ipc::listener() < 0) legacy_ipc::attach();
    if (listener < 0) try_listen();
    follow_the_folder();
}

// Accepts a connection; -1 if there is none. While the program has no descriptor left, clients stay
// in the queue, and poll() would return at once all the time.
int accept_at(int socket) {
    const int connection = channel::accept_from(socket, nullptr);
    if (connection < 0 && errno != EAGAIN && errno != EACCES)
        deaf_until = monotonic_ns() + kDeaf * 1'000'000ull;
    return connection;
}

void serve_once() {
    if (detached) wait_until_woken();
    let_go_of_closed();
    open_what_is_missing();
    cow::tidy();
    handlers::tidy();
    safe_points::tidy();
    shared_events::keep_promises_of_the_dead();
    const bool is_refining = gate::state() == State::running && ranges::refine();
    const uint64_t now = monotonic_ns();
    const bool deaf = now < deaf_until;
    std::vector<pollfd> watched{{deaf ? -1 : listener, POLLIN, 0},
                                {deaf ? -1 : legacy_ipc::listener(), POLLIN, 0},
                                {closing_pipe::near_end(), POLLIN, 0}};
    for (const int client : clients) watched.push_back({client, POLLIN, 0});
    // The deadline of a closing gate is checked even if no client calls.
    const int patience = gate::state() == State::closing ? 20
                         : is_refining                   ? kRefining
                         : now < wary_until              ? kWary
                         : deaf                          ? kDeaf
                                                         : 1000;
    const int ready = poll(watched.data(), watched.size(), patience);
    if (ready < 0) pause_for(kDeaf * 1'000'000l);  // more descriptors than the program may have
    if (ready <= 0) return;
    const auto calls = [](const pollfd& one) {
        return one.revents && descriptors::is_ours(one.fd);
    };
    if (calls(watched[1])) {
        const int peer = accept_at(watched[1].fd);
        if (peer >= 0) legacy_ipc::serve(peer);
        if (channel::overrun()) legacy_ipc::detach();  // and the program shares no memory any more
    }
    for (size_t i = 3; i < watched.size() && !detached; ++i)
        if (calls(watched[i]) && !serve(watched[i].fd)) drop(watched[i].fd);
    if (detached || !calls(watched[0])) return;
    const int client = accept_at(listener);
    if (client < 0) return;
    if (clients.size() < kMaxClients)
        clients.push_back(client);
    else
        descriptors::release(client);
}

void* run(void*) {
    prctl(PR_SET_NAME, "phos-hook");
    gate::exempt_this_thread();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (driver.cuThreadExchangeStreamCaptureMode) driver.cuThreadExchangeStreamCaptureMode(&mode);
    for (;;) serve_once();
    return nullptr;
}

}  // namespace

void start() {
    const char* runtime = secure_getenv("PHOS_RUNTIME_DIR");
    const std::string place = runtime && *runtime ? runtime : "/run/phos";
    socket_folder::look_in(place + "/hook");
    phosd_socket::look_in(place);
    legacy_ipc::attach();
    // Signals of the program are not delivered to this thread.
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

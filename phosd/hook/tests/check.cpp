#include "check.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

namespace phos::test {

CUcontext start_cuda() {
    OK(cuInit(0));
    CUcontext context = nullptr;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    return context;
}

std::string hooks_folder() {
    return std::string(std::getenv("PHOS_RUNTIME_DIR")) + "/hook/" + std::to_string(geteuid());
}

Client::Client(int pid) : socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s/%d.sock", hooks_folder().c_str(),
                  pid);
    int tries = 3000;
    while (connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
        CHECK(--tries);
        usleep(1000);
    }
}

Client::~Client() {
    close(socket);
}

Client::Answer Client::ask(wire::Type type, const void* payload, size_t size,
                           const std::vector<int>& descriptors) {
    const wire::Header header{wire::kMagic,
                              wire::kVersion,
                              static_cast<uint16_t>(type),
                              7,
                              0,
                              static_cast<uint32_t>(size),
                              static_cast<uint32_t>(descriptors.size())};
    CHECK(channel::send(socket, header, payload, descriptors));
    pollfd answered{socket, POLLIN, 0};
    CHECK(poll(&answered, 1, -1) == 1);  // it may take longer than the hook's patience
    channel::Message message;
    CHECK(channel::receive(socket, &message));
    CHECK(message.header.type == (static_cast<uint16_t>(type) | wire::kReply));
    CHECK(message.header.sequence == 7);
    return {static_cast<wire::Status>(message.header.status), message.payload, message.descriptors};
}

wire::Hello Client::hello() {
    const Answer answer = ask(wire::Type::hello);
    wire::Hello hello;
    CHECK(answer.payload.size() > sizeof hello);
    std::memcpy(&hello, answer.payload.data(), sizeof hello);
    CHECK(answer.payload.size() == sizeof hello + hello.devices * sizeof(wire::DeviceId));
    return hello;
}

namespace {
std::vector<wire::Block> read_list(const Client::Answer& answer, wire::BlockList* head) {
    CHECK(answer.status == wire::Status::ok && answer.payload.size() >= sizeof *head);
    std::memcpy(head, answer.payload.data(), sizeof *head);
    std::vector<wire::Block> blocks(head->count);
    CHECK(answer.payload.size() == sizeof *head + head->count * sizeof(wire::Block));
    std::memcpy(blocks.data(), answer.payload.data() + sizeof *head,
                head->count * sizeof(wire::Block));
    return blocks;
}
}  // namespace

std::vector<wire::Block> Client::list() {
    std::vector<wire::Block> all;
    wire::BlockList head{};
    do {
        const uint64_t after = all.empty() ? 0 : all.back().id;
        const auto part = read_list(ask(wire::Type::list_blocks, &after, sizeof after), &head);
        all.insert(all.end(), part.begin(), part.end());
    } while (head.more);
    return all;
}

std::vector<std::pair<uint64_t, int>> Client::export_all() {
    std::vector<std::pair<uint64_t, int>> held;
    wire::BlockList head{};
    uint64_t after = 0;
    do {
        const Answer answer = ask(wire::Type::export_blocks, &after, sizeof after);
        size_t next = 0;
        for (const wire::Block& block : read_list(answer, &head)) {
            after = block.id;
            if (block.flags & wire::kHasDescriptor)
                held.emplace_back(block.id, answer.descriptors.at(next++));
        }
        CHECK(next == answer.descriptors.size());
    } while (head.more);
    return held;
}

bool Client::close_gate(uint32_t deadline_ms, wire::GateState* last) {
    const wire::CloseGate request{deadline_ms, 2000, 0};
    for (;;) {
        const Answer answer = ask(wire::Type::close_gate, &request, sizeof request);
        if (answer.status == wire::Status::busy) return false;
        CHECK(answer.status == wire::Status::ok);
        wire::GateState state;
        CHECK(answer.payload.size() == sizeof state);
        std::memcpy(&state, answer.payload.data(), sizeof state);
        if (last) *last = state;
        if (state.settled) return true;
    }
}

void Client::open_gate() {
    CHECK(ask(wire::Type::open_gate).status == wire::Status::ok);
}

uint64_t count_of(const Client::Answer& answer) {
    if (answer.status != wire::Status::ok)
        std::fprintf(stderr, "%.*s\n", static_cast<int>(answer.payload.size()),
                     reinterpret_cast<const char*>(answer.payload.data()));
    CHECK(answer.status == wire::Status::ok);
    CHECK(answer.payload.size() == sizeof(uint64_t));
    uint64_t count = 0;
    std::memcpy(&count, answer.payload.data(), sizeof count);
    return count;
}

uint64_t Client::seal_gate() {
    return count_of(ask(wire::Type::seal_gate));
}

uint64_t Client::park() {
    return count_of(ask(wire::Type::park));
}

uint64_t Client::unpark(const std::vector<std::pair<uint64_t, int>>& held) {
    for (size_t first = 0; first < held.size(); first += wire::kMaxDescriptors) {
        std::vector<uint64_t> payload{0};
        std::vector<int> descriptors;
        for (size_t i = first; i < held.size() && descriptors.size() < wire::kMaxDescriptors; ++i) {
            payload.push_back(held[i].first);
            descriptors.push_back(held[i].second);
        }
        payload[0] = descriptors.size();
        count_of(ask(wire::Type::unpark_blocks, payload.data(), payload.size() * sizeof(uint64_t),
                     descriptors));
    }
    return count_of(ask(wire::Type::unpark));
}

}  // namespace phos::test

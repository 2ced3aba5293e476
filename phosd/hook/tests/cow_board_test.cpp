// Boards that are none, or not of this process: each is refused, and the program goes on.
#include <fcntl.h>
#include <sys/mman.h>

#include <functional>

#include "fake_mover.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

namespace {

bool is_running(Client& client) {
    return client.hello().state == static_cast<uint32_t>(wire::State::running);
}

// A board whose header, or a table of which, was changed.
void garbage_is_refused(Client& first) {
    const CUdeviceptr memory = filled(2, 1);
    using Change = std::function<void(board::View&, int)>;
    const auto header = [](auto change) {
        return Change([change](board::View& view, int) { change(view.header()); });
    };
    const Change changes[] = {
        header([](board::Header& h) { h.magic ^= 1; }),
        header([](board::Header& h) { h.version += 1; }),
        header([](board::Header& h) { h.size += 64; }),
        header([](board::Header& h) { h.phase = board::aborted; }),
        header([](board::Header& h) { h.chunk_count = 1u << 31; }),
        header([](board::Header& h) { h.chunk_count -= 1; }),
        header([](board::Header& h) { h.block_count = ~0u; }),
        header([](board::Header& h) { h.kernel_count = 1u << 30; }),
        header([](board::Header& h) { h.slot_count += 1; }),
        header([](board::Header& h) { h.slab_count += 1; }),
        header([](board::Header& h) { h.chunks_at = 64; }),
        header([](board::Header& h) { h.chunks_at += 4; }),
        header([](board::Header& h) { h.touched_at = ~0ull - 8; }),
        header([](board::Header& h) { h.blocks_at = h.size - 8; }),
        header([](board::Header& h) { h.slabs_at = 1ull << 40; }),
        header([](board::Header& h) { h.kernels_at = h.size + 8; }),
        [](board::View& v, int) { const_cast<board::BlockRow&>(v.block(0)).id = 1u << 30; },
        [](board::View& v, int) { const_cast<board::BlockRow&>(v.block(0)).id = 0; },
        [](board::View& v, int) { const_cast<board::BlockRow&>(v.block(0)).first_chunk = ~0u; },
        [](board::View& v, int) { const_cast<board::BlockRow&>(v.block(0)).chunk_count += 1; },
        [](board::View& v, int) { v.slab(0).device = -1; },
        [](board::View& v, int) { v.slab(0).device = 99; },
        [](board::View& v, int) { v.slab(0).device = 1; },  // the memory is of another
        [](board::View& v, int) { v.slab(0).slots = 0; },
        [](board::View& v, int) { v.slab(0).slots = 1u << 30; },
        [](board::View& v, int) { v.header().slot_count = v.slab(0).slots = 4096; },
    };
    for (const Change& change : changes) {
        Client client(getpid());  // one that is refused ends
        close_gate(client);
        FakeMover mover(client, {4});
        change(mover.board(), mover.descriptor);
        const wire::Status status = mover.arm(client).status;
        if (status == wire::Status::ok)
            std::fprintf(stderr, "change %ld was taken\n", static_cast<long>(&change - changes));
        CHECK(status == wire::Status::bad_message || status == wire::Status::driver);
        CHECK(is_running(first) || status == wire::Status::driver);
    }
    Client client(getpid());
    close_gate(client);
    const wire::Arm none{0, 0};
    // No memfd, one that can shrink, one that is too short.
    const int plain = open("/dev/null", O_RDWR | O_CLOEXEC);
    const int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    const int brief = memfd_create("brief", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(loose, 1 << 16) == 0 && ftruncate(brief, 16) == 0);
    CHECK(fcntl(brief, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    for (const int descriptor : {plain, loose, brief}) {
        Client other(getpid());
        CHECK(other.ask(wire::Type::arm, &none, sizeof none, {descriptor}).status ==
              wire::Status::wrong_state);  // the gate is another client's
        const auto answer = client.ask(wire::Type::arm, &none, sizeof none, {descriptor});
        CHECK(answer.status == wire::Status::bad_message);
        client.~Client();
        new (&client) Client(getpid());
        close_gate(client);
        close(descriptor);
    }
    FakeMover mover(client, {4});
    client.open_gate();
    CHECK(mover.arm(client).status == wire::Status::wrong_state);  // the gate is open
    CHECK(value_at(memory) == 1);
    OK(cuMemFree_v2(memory));
}

}  // namespace

int main() {
    start_workload();
    Client client(getpid());
    garbage_is_refused(client);
    std::puts("ok");
}

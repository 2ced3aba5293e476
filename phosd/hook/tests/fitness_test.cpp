// What stands in the way of parking is told by its name, each in a process of its own: what was
// told once stays told.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "check.h"

using namespace phos;
using namespace phos::test;

namespace {

constexpr const char* kEncoder = "the program has NVENC loaded (libnvidia-encode)";

void in_a_process(void (*test)(Client& client)) {
    const int pid = fork();
    if (pid == 0) {
        start_cuda();
        Client client(getpid());
        CHECK(client.hello().parkable == 1);
        test(client);
        _exit(0);
    }
    int status = 0;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}

void load_encoder() {
    CHECK(dlopen(STUB_ENCODER, RTLD_NOW | RTLD_LOCAL));
}

void a_library_with_private_tables_is_named(Client& client) {
    load_encoder();
    const wire::Hello hello = client.hello();
    CHECK(hello.parkable == 0 && hello.uses_unsupported == 0);
    CHECK(std::strcmp(hello.reason, kEncoder) == 0);
    CHECK(std::strcmp(hello.reason + std::strlen(kEncoder) + 1, "private-calls") == 0);
}

void one_that_was_loaded_since_is_found_when_the_gate_closes(Client& client) {
    CUdeviceptr memory = 0;
    OK(cuMemAlloc_v2(&memory, 1 << 20));
    load_encoder();
    CHECK(client.close_gate(4000));
    client.export_all();
    const Client::Answer answer = client.ask(wire::Type::park);
    CHECK(answer.status == wire::Status::unsupported);
    CHECK(std::string(answer.payload.begin(), answer.payload.end()) == kEncoder);
    client.open_gate();
}

}  // namespace

int main() {
    in_a_process(a_library_with_private_tables_is_named);
    in_a_process(one_that_was_loaded_since_is_found_when_the_gate_closes);
    std::puts("ok");
}

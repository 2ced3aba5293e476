// How the program's interpreter is asked to empty PyTorch's cache. The CPython that the hook finds
// is this test's own, so that it does what a real one does seldom, and counts its references.
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "workload.h"

using namespace phos;
using namespace phos::test;
using wire::Release;

namespace {

struct Object {
    const char* text;
    std::atomic<int> references{1};
};

Object modules{"modules"};
Object cuda{"torch.cuda"};
Object function{"empty_cache"};
Object nothing{"None"};
Object shown{"RuntimeError('no\x01pe')"};
Object an_exception{"an exception of the program's"};
Object exception_class{"Exception"};
Object interrupt_class{"KeyboardInterrupt"};
Object* const all[] = {&modules, &cuda,         &function,        &nothing,
                       &shown,   &an_exception, &exception_class, &interrupt_class};

// What the interpreter does, and what has been done with it.
std::atomic<bool> initialized{true};
std::atomic<bool> full{false};
std::atomic<bool> imported{true};
std::atomic<bool> showable{true};
Object* raises = nullptr;
Object* raised = nullptr;
std::atomic<unsigned> emptied{0};

using Call = int (*)(void*);
std::mutex mutex;
std::deque<Call> pending;

Object* referred(Object* object) {
    if (object) ++object->references;
    return object;
}

size_t calls_pending() {
    const std::lock_guard lock(mutex);
    return pending.size();
}

// What the main thread does between two bytecodes.
int run_pending() {
    Call call = nullptr;
    {
        const std::lock_guard lock(mutex);
        if (pending.empty()) return 0;
        call = pending.front();
        pending.pop_front();
    }
    return call(nullptr);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
Object* PyExc_Exception = &exception_class;

int Py_IsInitialized() {
    return initialized;
}
int Py_AddPendingCall(Call call, void*) {
    const std::lock_guard lock(mutex);
    if (full) return -1;
    pending.push_back(call);
    return 0;
}
Object* PyImport_GetModuleDict() {
    return &modules;
}
Object* PyDict_GetItemString(Object* object, const char* name) {
    CHECK(object == &modules && std::strcmp(name, "torch.cuda") == 0);
    return imported ? &cuda : nullptr;
}
Object* PyObject_GetAttrString(Object* object, const char* name) {
    CHECK(object == &cuda && std::strcmp(name, "empty_cache") == 0);
    return referred(&function);
}
Object* PyObject_CallObject(Object* object, Object* arguments) {
    CHECK(object == &function && !arguments && !raised);
    ++emptied;
    errno = EBADF;
    if (!raises) return referred(&nothing);
    raised = referred(raises);
    return nullptr;
}
Object* PyObject_Repr(Object*) {
    CHECK(!raised);
    if (!showable) {
        raised = referred(&an_exception);
        return nullptr;
    }
    return referred(&shown);
}
Object* PyUnicode_AsUTF8String(Object* object) {
    return referred(object);
}
const char* PyBytes_AsString(Object* object) {
    return object->text;
}
void PyErr_Fetch(Object** type, Object** value, Object** trace) {
    *type = raised;
    *value = referred(raised);
    *trace = nullptr;
    raised = nullptr;
}
void PyErr_NormalizeException(Object**, Object**, Object**) {}
void Py_DecRef(Object* object) {
    if (object) --object->references;
}
void PyErr_Restore(Object* type, Object* value, Object*) {
    CHECK(!raised);
    raised = type;
    Py_DecRef(value);
}
void PyErr_Clear() {
    Py_DecRef(raised);
    raised = nullptr;
}
int PyErr_GivenExceptionMatches(Object* type, Object* wanted) {
    CHECK(wanted == &exception_class);
    return type != &interrupt_class;
}
}
#pragma GCC visibility pop

namespace {

wire::ReleaseState cache(Client& client, bool ask) {
    const wire::EmptyCache request{ask, 0};
    const Client::Answer answer = client.ask(wire::Type::empty_cache, &request, sizeof request);
    wire::ReleaseState state{};
    CHECK(answer.status == wire::Status::ok && answer.payload.size() == sizeof state);
    std::memcpy(&state, answer.payload.data(), sizeof state);
    return state;
}

Release ask(Client& client) {
    return static_cast<Release>(cache(client, true).release);
}
Release tell(Client& client) {
    return static_cast<Release>(cache(client, false).release);
}

void the_main_thread_makes_one_call_for_all_who_ask(Client& client) {
    CHECK(tell(client) == Release::none);
    Client other(getpid());
    CHECK(ask(client) == Release::asked);
    CHECK(ask(other) == Release::asked);
    CHECK(tell(client) == Release::asked);
    CHECK(calls_pending() == 1 && emptied == 0);
    errno = ENOENT;
    CHECK(run_pending() == 0 && errno == ENOENT);
    CHECK(emptied == 1);
    CHECK(tell(client) == Release::released && tell(other) == Release::released);
    CHECK(calls_pending() == 0);
    CHECK(ask(other) == Release::asked && run_pending() == 0);
    CHECK(tell(other) == Release::released && emptied == 2);
}

void what_cannot_be_asked_for(Client& client) {
    imported = false;
    CHECK(ask(client) == Release::asked && run_pending() == 0);
    CHECK(tell(client) == Release::no_torch);
    imported = true;
    full = true;
    CHECK(ask(client) == Release::failed);
    CHECK(std::strstr(cache(client, false).reason, "too many calls"));
    full = false;
    // The call is lost with its interpreter, and nobody waits for it.
    CHECK(ask(client) == Release::asked);
    initialized = false;
    pending.clear();
    CHECK(ask(client) == Release::no_interpreter);
    initialized = true;
    CHECK(ask(client) == Release::asked && run_pending() == 0);
    CHECK(tell(client) == Release::released);
}

void a_capture_is_left_alone(Client& client) {
    const unsigned before = emptied;
    CUstream stream = nullptr;
    CUgraph graph = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK(ask(client) == Release::asked && run_pending() == 0);
    CHECK(tell(client) == Release::capturing && emptied == before);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy_v2(stream));
}

void its_exceptions_are_not_the_programs(Client& client) {
    raised = referred(&an_exception);  // as if the program had raised it
    raises = &an_exception;
    CHECK(ask(client) == Release::asked && run_pending() == 0);
    CHECK(raised == &an_exception);
    CHECK(tell(client) == Release::failed);
    CHECK(std::strstr(cache(client, false).reason, "raised RuntimeError("));
    PyErr_Clear();
    showable = false;
    CHECK(ask(client) == Release::asked && run_pending() == 0);
    CHECK(!raised);
    CHECK(std::strstr(cache(client, false).reason, "raised an exception"));
    showable = true;
}

void but_those_of_signals_are(Client& client) {
    raises = &interrupt_class;
    CHECK(ask(client) == Release::asked && run_pending() == -1);
    CHECK(raised == &interrupt_class);
    CHECK(tell(client) == Release::failed);
    PyErr_Clear();
    raises = nullptr;
}

void a_text_is_cut(Client& client) {
    const std::string longest(1000, 'x');
    raises = &an_exception;
    shown.text = longest.c_str();
    CHECK(ask(client) == Release::asked && run_pending() == 0);
    CHECK(std::strlen(cache(client, false).reason) == sizeof wire::ReleaseState{}.reason - 1);
    raises = nullptr;
}

void nobody_is_asked_while_the_gate_is_closed(Client& client) {
    CHECK(client.close_gate(kDeadline));
    for (const uint32_t wanted : {0u, 1u}) {
        const wire::EmptyCache request{wanted, 0};
        CHECK(client.ask(wire::Type::empty_cache, &request, sizeof request).status ==
              wire::Status::wrong_state);
    }
    client.open_gate();
    CHECK(calls_pending() == 0);
}

void a_forked_child_does_nothing(Client& client) {
    const unsigned before = emptied;
    CHECK(ask(client) == Release::asked);
    const pid_t child = fork();
    if (child == 0) _exit(run_pending() == 0 && emptied == before ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(run_pending() == 0 && emptied == before + 1);
}

void the_main_thread_and_those_who_ask_meet_at_any_time() {
    std::atomic<bool> over{false};
    std::thread main_thread([&] {
        while (!over || calls_pending()) CHECK(run_pending() == 0);
    });
    std::vector<std::thread> askers;
    for (int i = 0; i < 3; ++i)
        askers.emplace_back([] {
            Client client(getpid());
            for (int times = 0; times < 100; ++times) {
                for (Release now = ask(client); now != Release::released; now = tell(client))
                    CHECK(now == Release::asked);
            }
        });
    for (std::thread& asker : askers) asker.join();
    over = true;
    main_thread.join();
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    start_workload();
    {
        Client client(getpid());
        the_main_thread_makes_one_call_for_all_who_ask(client);
        what_cannot_be_asked_for(client);
        a_capture_is_left_alone(client);
        std::puts("asked");
        its_exceptions_are_not_the_programs(client);
        but_those_of_signals_are(client);
        a_text_is_cut(client);
        std::puts("exceptions");
        nobody_is_asked_while_the_gate_is_closed(client);
        a_forked_child_does_nothing(client);
    }
    the_main_thread_and_those_who_ask_meet_at_any_time();
    for (const Object* object : all) CHECK(object->references == 1);
    std::puts("ok");
}

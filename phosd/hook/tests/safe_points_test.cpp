// Threads that wait to be saved, a phosd that answers them as it likes, and a client that waits for
// a safe point. The phosd is this test's own.
#include <fcntl.h>
#include <phos.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fake_phosd.h"
#include "workload.h"

using namespace phos;
using namespace phos::test;

// As a program finds them with dlsym().
extern "C" {
phos_program_refuse_t phos_program_refuse;
phos_program_begin_t phos_program_begin;
phos_program_begin_named_t phos_program_begin_named;
phos_program_wait_t phos_program_wait;
phos_program_leave_t phos_program_leave;
}

namespace {

wire::ProgramState say(Client& client, wire::Ask ask, int outcome = 0, uint64_t wish = 0,
                       uint32_t then = 0, const char* text = "") {
    wire::ProgramAsk said{static_cast<uint32_t>(ask), outcome, then, 0, wish, {}};
    std::snprintf(said.text, sizeof said.text, "%s", text);
    const Client::Answer answer = client.ask(wire::Type::program, &said, sizeof said);
    wire::ProgramState state{};
    CHECK(answer.status == wire::Status::ok && answer.payload.size() == sizeof state);
    std::memcpy(&state, answer.payload.data(), sizeof state);
    return state;
}

wire::ProgramState look(Client& client) {
    return say(client, wire::Ask::look);
}

void until_waiting(Client& client, unsigned count) {
    for (int i = 0; look(client).waiting != count; ++i) {
        CHECK(i < 20000);
        usleep(1000);
    }
}

// A thread of the program in a call of phos.h.
class Asker {
  public:
    explicit Asker(phos_then then = PHOS_RUN) : Asker([then] { return phos_checkpoint(then); }) {}
    explicit Asker(const std::function<int()>& call)
        : thread_([this, call] {
              errno = EBADF;
              outcome = call();
              why = phos_why();
              CHECK(errno == EBADF);
          }) {}
    int end() {
        thread_.join();
        return outcome;
    }
    int outcome = PHOS_WAITING;
    std::string why;

  private:
    std::thread thread_;
};

// Detaches and wakes the hook, as a checkpoint does.
std::unique_ptr<Client> woken_after_stop(
    Client& client, const std::function<void()>& meanwhile = [] {}) {
    CHECK(client.close_gate(kDeadline));
    CHECK(client.ask(wire::Type::detach).status == wire::Status::ok);
    meanwhile();
    const std::string wake = hooks_folder() + "/" + std::to_string(getpid()) + ".wake";
    close(open(wake.c_str(), O_CREAT | O_WRONLY, 0600));
    auto again = std::make_unique<Client>(getpid());
    unlink(wake.c_str());
    return again;
}

void nobody_is_there(Client& client) {
    CHECK(phos_checkpoint(PHOS_RUN) == PHOS_NOTHING);
    CHECK(phos_checkpoint(7) == PHOS_NOTHING);
    CHECK(look(client).waiting == 0 && look(client).wish == 0 && !look(client).declared);
}

void a_wish_is_refused_or_not_heard(std::unique_ptr<Client>* client) {
    {
        Daemon daemon(wire::Status::busy);
        Asker asker;
        CHECK(asker.end() == PHOS_FAILED && asker.why == "Busy: too often");
    }
    Daemon daemon(wire::Status::ok, false);
    Asker asker;
    daemon.next(1);
    // It talks to phosd still, and CRIU would find the connection: detaching waits for its end.
    *client = woken_after_stop(**client, [&] { CHECK(daemon.has_lost(0)); });
    (*client)->open_gate();
    CHECK(asker.end() == PHOS_FAILED && asker.why.rfind("Timeout: phosd does not answer", 0) == 0);
    CHECK(look(**client).wish == 0);
}

void a_file_in_place_of_the_socket(Client& client) {
    const std::string path = runtime_dir() + "/program.sock";
    close(open(path.c_str(), O_CREAT | O_WRONLY, 0600));
    CHECK(phos_checkpoint(PHOS_RUN) == PHOS_NOTHING);
    unlink(path.c_str());
    CHECK(look(client).wish == 0);
}

void threads_share_a_wish(Client& client, std::unique_ptr<Client>* later) {
    Daemon daemon;
    std::vector<std::unique_ptr<Asker>> askers;
    for (int i = 0; i < 10; ++i) askers.push_back(std::make_unique<Asker>());
    until_waiting(client, 10);
    const wire::ProgramWish wish = daemon.next(1);
    CHECK(wish.wish && wish.then == PHOS_RUN && look(client).wish == wish.wish);
    std::unique_ptr<Client> again = woken_after_stop(client);
    again->open_gate();
    // A request that comes after the stop is not in the image, and is made anew.
    Asker late;
    until_waiting(*again, 11);
    say(*again, wire::Ask::answer, PHOS_SAVED, wish.wish);
    for (const auto& asker : askers) CHECK(asker->end() == PHOS_SAVED && asker->why.empty());
    const wire::ProgramWish other = daemon.next(2);
    CHECK(daemon.heard() == 2 && other.wish != wish.wish);
    say(*again, wire::Ask::answer, PHOS_FAILED, other.wish, 0, "OutOfSpace: no");
    CHECK(late.end() == PHOS_FAILED && late.why == "OutOfSpace: no");
    CHECK(look(*again).wish == 0);
    *later = std::move(again);
}

void an_image_of_others_serves_those_who_want_the_same(std::unique_ptr<Client>* client) {
    Daemon daemon;
    Asker runs(PHOS_RUN);
    until_waiting(**client, 1);
    const uint64_t first = daemon.next(1).wish;
    Asker ends(PHOS_END);
    until_waiting(**client, 2);
    *client = woken_after_stop(**client);
    (*client)->open_gate();
    say(**client, wire::Ask::answer, PHOS_SAVED, 0, PHOS_RUN);
    CHECK(runs.end() == PHOS_SAVED);
    const wire::ProgramWish second = daemon.next(2);
    CHECK(second.then == PHOS_END && second.wish != first);
    say(**client, wire::Ask::answer, PHOS_FAILED, first, 0, "too late");
    until_waiting(**client, 1);
    say(**client, wire::Ask::answer, PHOS_FAILED, second.wish, 0, "Cancelled: by hand");
    CHECK(ends.end() == PHOS_FAILED && ends.why == "Cancelled: by hand");
}

void an_image_of_another_name_serves_nobody_else(std::unique_ptr<Client>* client) {
    CHECK(phos_checkpoint_named(PHOS_RUN, std::string(64, 'x').c_str()) == PHOS_FAILED);
    CHECK(std::string(phos_why()).rfind("InvalidOption: ", 0) == 0);
    Daemon daemon;
    const auto named = [](const char* name) {
        return [name] { return phos_checkpoint_named(PHOS_RUN, name); };
    };
    Asker first(named("best"));
    until_waiting(**client, 1);
    CHECK(daemon.name(1) == "best");
    Asker same(named("best"));
    Asker other(named("last"));
    Asker without;
    until_waiting(**client, 4);
    *client = woken_after_stop(**client);
    (*client)->open_gate();
    say(**client, wire::Ask::answer, PHOS_SAVED, 0, PHOS_RUN, "best");
    CHECK(first.end() == PHOS_SAVED && same.end() == PHOS_SAVED);
    const bool last_first = daemon.name(2) == "last";
    CHECK(last_first || daemon.name(2).empty());
    say(**client, wire::Ask::answer, PHOS_SAVED, daemon.next(2).wish);
    CHECK((last_first ? other : without).end() == PHOS_SAVED);
    CHECK(daemon.name(3) == (last_first ? "" : "last"));
    say(**client, wire::Ask::answer, PHOS_FAILED, daemon.next(3).wish, 0, "Busy: now");
    CHECK((last_first ? without : other).end() == PHOS_FAILED && daemon.heard() == 3);
}

void a_wish_that_nobody_wants_any_more_is_gone(Client& client) {
    Daemon daemon;
    const uint64_t ticket = phos_program_begin(PHOS_ASKS, PHOS_RUN);
    CHECK(phos_program_begin(PHOS_JOINS, PHOS_END) == 0);
    const uint64_t joined = phos_program_begin(PHOS_JOINS, PHOS_RUN);
    CHECK(joined && phos_program_wait(joined, 0, nullptr, 0) == PHOS_WAITING);
    CHECK(daemon.next(1).wish == look(client).wish);
    phos_program_leave(ticket);
    CHECK(look(client).wish != 0);
    phos_program_leave(joined);
    CHECK(look(client).wish == 0 && look(client).waiting == 0);
    CHECK(phos_program_begin(PHOS_JOINS, PHOS_RUN) == 0);
    CHECK(phos_program_wait(ticket, 0, nullptr, 0) == PHOS_NOTHING);
    phos_program_leave(ticket);
}

void phosd_ends(Client& client) {
    auto daemon = std::make_unique<Daemon>();
    Asker asker;
    until_waiting(client, 1);
    daemon->next(1);
    daemon.reset();
    CHECK(asker.end() == PHOS_FAILED && asker.why.rfind("NoSuchProcess: phosd ended", 0) == 0);
}

void a_safe_point_is_waited_for(std::unique_ptr<Client>* client) {
    CHECK(!phos_wanted() && phos_safe_point() == PHOS_NOTHING);
    CHECK(look(**client).declared);
    auto other = std::make_unique<Client>(getpid());
    say(*other, wire::Ask::want);
    CHECK(phos_wanted());
    {
        Asker passes([] { return phos_safe_point(); });
        until_waiting(*other, 1);
        other.reset();  // the job has failed, or its phosd was killed
        CHECK(passes.end() == PHOS_NOTHING);
    }
    CHECK(!phos_wanted());
    {
        auto waits = std::make_unique<Client>(getpid());
        say(*waits, wire::Ask::want);
        Asker passes([] { return phos_safe_point(); });
        until_waiting(*waits, 1);
        say(*waits, wire::Ask::pass);
        CHECK(passes.end() == PHOS_NOTHING && phos_wanted());
    }
    while (phos_wanted()) usleep(1000);
    // Stopped: it goes on when the gate is open again, whatever the client does.
    say(**client, wire::Ask::want);
    Asker passes([] { return phos_safe_point(); });
    until_waiting(**client, 1);
    *client = woken_after_stop(**client);
    CHECK(!phos_wanted() && look(**client).waiting == 1);
    (*client)->open_gate();
    CHECK(passes.end() == PHOS_STOPPED);
    // A callable has failed.
    say(**client, wire::Ask::want);
    phos_program_refuse("flush raised");
    CHECK(look(**client).refused && std::strcmp(look(**client).reason, "flush raised") == 0);
    CHECK(!say(**client, wire::Ask::want).refused);
    Client(getpid()).hello();
    phos_end_safe_points();
    CHECK(!look(**client).declared);
}

void a_capture_is_no_safe_point() {
    Client client(getpid());
    CUstream stream = nullptr;
    CUgraph graph = nullptr;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK(phos_checkpoint(PHOS_RUN) == PHOS_FAILED);
    CHECK(std::strstr(phos_why(), "Unsupported: a stream capture"));
    say(client, wire::Ask::want);
    CHECK(phos_safe_point() == PHOS_NOTHING);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy_v2(stream));
}

void a_forked_child_is_alone() {
    Client client(getpid());
    say(client, wire::Ask::want);
    const pid_t child = fork();
    if (child == 0)
        _exit(phos_checkpoint(PHOS_RUN) == PHOS_NOTHING && phos_safe_point() == PHOS_NOTHING ? 0
                                                                                             : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

// A thread that is cancelled while it waits leaves at the end of its slice, and no lock behind.
void a_cancelled_thread_leaves_no_lock(Client& client) {
    Daemon daemon;
    pthread_t thread;
    CHECK(pthread_create(
              &thread, nullptr,
              [](void*) -> void* {
                  const uint64_t ticket = phos_program_begin(PHOS_ASKS, PHOS_RUN);
                  for (;;) {
                      phos_program_wait(ticket, 10, nullptr, 0);
                      pthread_testcancel();
                  }
              },
              nullptr) == 0);
    const uint64_t wish = daemon.next(1).wish;
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, nullptr) == 0);
    CHECK(look(client).wish == wish);
    say(client, wire::Ask::answer, PHOS_FAILED, wish, 0, "gone");
    CHECK(look(client).wish == 0 && look(client).waiting == 0);
}

void many_at_any_time(Client& client) {
    while (phos_wanted()) usleep(1000);  // the hook sees that the last client has gone
    Daemon daemon;
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i)
        threads.emplace_back([&, i] {
            while (!over) {
                const int outcome = phos_checkpoint(i % 3 ? PHOS_RUN : PHOS_HOLD);
                CHECK(outcome == PHOS_FAILED);
                CHECK(phos_safe_point() == PHOS_NOTHING);
            }
        });
    for (size_t count = 1; count < 60; ++count) {
        const wire::ProgramWish wish = daemon.next(count);
        say(client, wire::Ask::answer, PHOS_FAILED, wish.wish, 0, "again");
    }
    over = true;
    for (size_t count = 60; look(client).waiting; ++count)
        if (const uint64_t wish = look(client).wish)
            say(client, wire::Ask::answer, PHOS_FAILED, wish, 0, "over");
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    CHECK(phos_checkpoint(PHOS_RUN) == PHOS_NOTHING);
    start_workload();
    auto client = std::make_unique<Client>(getpid());
    nobody_is_there(*client);
    a_wish_is_refused_or_not_heard(&client);
    a_file_in_place_of_the_socket(*client);
    std::puts("told");
    std::unique_ptr<Client> later;
    threads_share_a_wish(*client, &later);
    client = std::move(later);
    an_image_of_others_serves_those_who_want_the_same(&client);
    an_image_of_another_name_serves_nobody_else(&client);
    a_wish_that_nobody_wants_any_more_is_gone(*client);
    phosd_ends(*client);
    std::puts("asked");
    a_safe_point_is_waited_for(&client);
    client = std::make_unique<Client>(getpid());
    a_capture_is_no_safe_point();
    a_forked_child_is_alone();
    a_cancelled_thread_leaves_no_lock(*client);
    many_at_any_time(*client);
    std::puts("ok");
}

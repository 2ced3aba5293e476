#include "safe_point_model.h"

#include <algorithm>
#include <iterator>

namespace phos::test {

std::string World::key() const {
    // Threads are alike, and so are the things that they ask for.
    const uint8_t swap = any_shares() ? then : 0;
    std::string each[kThreads];
    for (size_t i = 0; i < count; ++i) {
        const Thread& t = threads[i];
        const int what = t.waits() && t.asks ? t.then ^ swap : 0;
        for (const int value : {static_cast<int>(t.at), static_cast<int>(t.end),
                                static_cast<int>(t.said), static_cast<int>(machine.wait(i)),
                                what << 5 | t.asks << 4 | t.in_stop << 3 | t.shares << 2 |
                                    t.talks_of_latest << 1 | t.looks_for_latest})
            each[i].push_back(static_cast<char>(value));
    }
    std::sort(std::begin(each), std::end(each));
    std::string all;
    for (const std::string& one : each) all += one;
    for (const int value : {static_cast<int>(machine.wish()), static_cast<int>(machine.process()),
                            static_cast<int>(machine.want()), static_cast<int>(hook),
                            restored << 4 | open << 3 | client << 2 | refused << 1 | heard,
                            told << 3 | alive << 2 | knows << 1 | hearer_gone})
        all.push_back(static_cast<char>(value));
    return all;
}

bool World::all_out() const {
    for (const Thread& t : threads)
        if (t.at != At::out) return false;
    return true;
}

bool World::any_shares() const {
    for (const Thread& t : threads)
        if (t.shares) return true;
    return false;
}

bool World::any_talks() const {
    for (const Thread& t : threads)
        if (t.at == At::talking || t.at == At::talked) return true;
    return false;
}

// -- what is true

void World::end(size_t thread, State how) {
    threads[thread].end = how;
    threads[thread].shares = false;
}

void World::end_sharers(State how) {
    for (size_t i = 0; i < count; ++i)
        if (threads[i].shares) end(i, how);
}

// What is over makes no difference any more: without this there are ten times as many worlds.
void World::forget() {
    for (Thread& t : threads) {
        if (t.waits()) continue;
        t.asks = t.in_stop = false;
        t.then = 0;
    }
    if (any_shares()) return;
    then = 0;
    heard = told = knows = hearer_gone = false;
    for (Thread& t : threads) t.looks_for_latest = false;
}

// Threads at a safe point go on when nobody wants them there, and the program runs.
void World::let_go() {
    for (size_t i = 0; i < count; ++i)
        if (threads[i].waits() && !threads[i].asks && present() && open && !client)
            end(i, threads[i].in_stop ? State::stopped : State::nothing);
}

// A restored program goes on: who has waited through the stop hears that it is restored. No phosd
// knows what it asked for.
void World::become_present() {
    if (!restored) return;
    restored = false;
    for (size_t i = 0; i < count; ++i) {
        threads[i].shares = false;
        if (threads[i].waits() && threads[i].in_stop) end(i, State::restored);
    }
    forget();
}

bool World::check() {
    forget();
    for (size_t i = 0; i < count; ++i) {
        const Thread& t = threads[i];
        if (t.at == At::out) {
            expect(machine.wait(i) == State::free, "a thread that has left still waits");
            continue;
        }
        expect(machine.waiting(i) == t.waits(),
               t.waits() ? "a thread goes on too early" : "a thread is not told that it may go on");
        if (!t.waits()) expect(machine.wait(i) == t.end, "a thread is told what is not so");
        expect(machine.shares(i) == t.shares, "a thread does not share the wish that it asks for");
        expect(machine.at_point(i) == (t.waits() && !t.asks), "a safe point becomes a wish");
    }
    expect(machine.has_wish() == any_shares(), "there is a wish that nobody shares, or none");
    expect(machine.talks() == any_talks(), "it is not known that a thread talks to phosd");
    expect(!(any_talks() && hook == Hook::detached), "CRIU meets a thread's socket");
    expect((machine.wish() == State::told) == told, "it is not known that phosd was told");
    expect(machine.has_client() == client, "it is not known whether a safe point is waited for");
    expect(machine.was_refused() == refused, "a refusal is lost");
    return true;
}

// -- threads of the program

bool World::begin(size_t thread, bool asks, uint8_t what, bool possible) {
    Thread& t = threads[thread];
    if (t.at != At::out) return false;
    t = Thread{};
    t.at = At::inside;
    t.asks = asks;
    t.then = what;
    expect(machine.happens_to(thread, asks ? Event::comes_to_ask : Event::comes_to_point),
           "there is no place for a thread");
    if (possible) {
        join(thread);
    } else {
        machine.happens_to(thread, Event::cannot_ask);
        end(thread, State::failed);
    }
    return check();
}

void World::join(size_t thread) {
    Thread& t = threads[thread];
    const bool first = !any_shares();
    const bool may = t.waits() && t.asks && !t.shares && (first || then == t.then);
    const bool joined = machine.joins(thread, !first && then == t.then);
    expect(joined == may, "a thread shares a wish for something else, or none");
    t.shares = t.shares || may;
    if (!first || !may) return;
    then = t.then;
    heard = told = knows = hearer_gone = false;
    for (Thread& other : threads) other.talks_of_latest = other.looks_for_latest = false;
}

bool World::enter(size_t thread) {
    Thread& t = threads[thread];
    if (t.at != At::inside) return false;
    join(thread);
    machine.happens(Event::goes_on, open);
    let_go();
    const bool should = t.waits() && t.shares && !told && !any_talks() && present();
    const bool does = machine.tells(thread);
    expect(does == should, does ? "a thread talks to phosd at the wrong time"
                                : "a wish that nobody tells phosd of");
    t.at = does ? At::talking : At::asleep;
    t.talks_of_latest = does;
    t.said = Said::nothing_yet;
    return check();
}

bool World::hear(size_t thread, Said said) {
    Thread& t = threads[thread];
    if (t.at != At::talking || (said == Said::nobody) == alive) return false;
    t.at = At::talked;
    t.said = said;
    if (said != Said::yes || !t.talks_of_latest) return true;
    expect(!heard, "phosd hears of a wish twice");
    heard = true;
    knows = any_shares();
    return true;
}

bool World::end_talk(size_t thread) {
    Thread& t = threads[thread];
    if (t.at != At::talked) return false;
    t.at = At::asleep;
    machine.happens(t.said == Said::yes  ? Event::heard
                    : t.said == Said::no ? Event::not_heard
                                         : Event::nobody_there);
    if (t.talks_of_latest && t.said == Said::yes)
        told = any_shares();
    else if (t.talks_of_latest)
        end_sharers(t.said == Said::no ? State::failed : State::nothing);
    return check();
}

// It wakes as its wait has ended, or the slice of time has.
bool World::wake(size_t thread) {
    Thread& t = threads[thread];
    if (t.at != At::asleep) return false;
    t.at = At::looking;
    t.looks_for_latest = machine.depends_on_phosd(thread, open);
    expect(t.looks_for_latest == (t.shares && told && present() && open),
           "a thread does not look whether phosd lives, or in the stop");
    return check();
}

bool World::look(size_t thread) {
    Thread& t = threads[thread];
    if (t.at != At::looking) return false;
    t.at = At::inside;
    if (t.looks_for_latest && hearer_gone) {
        machine.happens(Event::phosd_lost);
        if (told && present()) end_sharers(State::failed);
    }
    t.looks_for_latest = false;
    return check();
}

bool World::leave(size_t thread) {
    Thread& t = threads[thread];
    if (t.at != At::inside) return false;
    machine.happens_to(thread, Event::leaves);
    t = Thread{};
    return check();
}

bool World::refuse() {
    expect(machine.happens(Event::refuses) == client, "why it was refused is lost");
    refused = refused || client;
    return check();
}

// -- requests of phosd: on the hook's thread, as long as it has sockets

bool World::want() {
    if (hook != Hook::here) return false;
    machine.happens(Event::wants);
    client = true;
    refused = false;
    return check();
}

bool World::lose_client() {
    if (hook != Hook::here || !client) return false;
    client = false;
    machine.happens(Event::wants_no_more);
    machine.happens(Event::goes_on, open);
    let_go();
    return check();
}

bool World::pass() {
    if (hook != Hook::here) return false;
    machine.happens(Event::passes, open);
    for (size_t i = 0; i < count; ++i)
        if (threads[i].waits() && !threads[i].asks && present() && open) end(i, State::nothing);
    return check();
}

// An answer to the latest wish, as long as there is one, or to one before.
bool World::answer(bool saved, bool latest) {
    if (hook != Hook::here || (latest && !heard)) return false;
    if (!latest || !any_shares()) return check();
    machine.happens(saved ? Event::saves : Event::fails);
    for (size_t i = 0; i < count; ++i) {
        if (!threads[i].shares) continue;
        if (!saved || threads[i].in_stop) end(i, saved ? State::saved : State::failed);
        threads[i].shares = false;
    }
    return check();
}

bool World::answer_too(uint8_t what) {
    if (hook != Hook::here) return false;
    for (size_t i = 0; i < count; ++i) {
        if (threads[i].then != what) continue;
        machine.happens_to(i, Event::saves_too);
        if (threads[i].waits() && threads[i].asks && threads[i].in_stop) end(i, State::saved);
    }
    return check();
}

// -- what becomes of the process

bool World::close_gate() {
    if (hook != Hook::here || !open) return false;
    open = false;
    return check();
}

bool World::stop() {
    if (hook != Hook::here || open) return false;
    machine.happens(Event::stops);
    for (Thread& t : threads) t.in_stop = t.in_stop || t.waits();
    return check();
}

bool World::open_gate() {
    if (hook != Hook::here) return false;
    open = true;
    machine.happens(Event::gate_opens);
    become_present();
    machine.happens(Event::goes_on, open);
    let_go();
    return check();
}

bool World::begin_detaching() {
    if (hook != Hook::here) return false;
    hook = Hook::leaving;
    machine.happens(Event::detaches);
    return check();
}

bool World::end_detaching() {
    if (hook != Hook::leaving) return false;
    const bool done = machine.happens(Event::has_detached);
    expect(done == !any_talks(), done ? "it detaches while a thread talks" : "it never detaches");
    if (!done) return check();
    hook = Hook::detached;
    client = false;
    for (Thread& t : threads) t.in_stop = t.in_stop || t.waits();
    return check();
}

bool World::give_up_detaching() {
    if (hook != Hook::leaving) return false;
    hook = Hook::here;
    machine.happens(Event::cannot_detach);
    return check();
}

bool World::wake_hook(bool made_anew) {
    if (hook != Hook::detached) return false;
    hook = Hook::here;
    restored = restored || made_anew;
    if (made_anew) knows = false;
    machine.happens(made_anew ? Event::wakes_restored : Event::wakes);
    machine.happens(Event::goes_on, open);
    let_go();
    return check();
}

bool World::tidy(bool long_after) {
    if (hook != Hook::here) return false;
    if (long_after) {
        machine.happens(Event::nobody_opens, open);
        if (open) become_present();
    }
    machine.happens(Event::goes_on, open);
    let_go();
    return check();
}

// -- what becomes of phosd

bool World::kill_phosd() {
    if (!alive) return false;
    alive = knows = false;
    hearer_gone = heard;
    return true;
}

bool World::start_phosd() {
    if (alive) return false;
    alive = true;
    return true;
}

}  // namespace phos::test

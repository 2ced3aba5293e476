// Every interleaving of the model of safe points (safe_point_model.h), on the hook's own table: no
// thread goes on too early, is told what is not so, or waits for ever. Each rule of the table that
// is broken on purpose is found out, so the model has teeth.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "safe_point_model.h"

using namespace phos::test;

namespace {

using Table = std::vector<Rule>;

Table own_table() {
    Table rules;
    for (const Rule* rule = phos::safe_points::kRules; rule->on != Event::none; ++rule)
        rules.push_back(*rule);
    return rules;
}

struct Finding {
    std::string wrong;
    size_t worlds = 0;
};

// One step of each: all that has begun goes on, and nothing begins. phosd fails whatever it hears.
void run_on(World& w, bool made_anew) {
    for (size_t i = 0; i < w.count; ++i) {
        w.hear(i, w.alive ? Said::yes : Said::nobody);
        w.end_talk(i);
    }
    w.end_detaching();
    w.wake_hook(made_anew);
    w.lose_client();
    if (!w.open || w.restored) w.open_gate();
    if (w.knows) w.answer(false, true);
    for (size_t i = 0; i < w.count; ++i) {
        w.wake(i);
        w.look(i);
        if (w.machine.ended(i)) w.leave(i);
        w.enter(i);
    }
}

// Whether each thread comes back, with a phosd that fails all it hears, or with none.
const char* who_waits_for_ever(const World& from) {
    for (const bool made_anew : {false, true})
        for (const bool ends : {false, true}) {
            World w = from;
            if (ends) w.kill_phosd();
            for (int round = 0; round < 8 && !w.all_out() && !w.wrong; ++round)
                run_on(w, made_anew);
            if (w.wrong) return w.wrong;
            if (!w.all_out()) return "a thread waits for ever";
        }
    return nullptr;
}

Finding explore(const Table& table, size_t threads) {
    Table rules = table;
    rules.push_back({State::free, Event::none, State::free});
    std::unordered_set<std::string> known;
    std::deque<World> ahead{World(rules.data(), threads)};
    known.insert(ahead.front().key());
    Finding found;
    while (!ahead.empty() && found.wrong.empty()) {
        const World world = ahead.front();
        ahead.pop_front();
        if (const char* why = who_waits_for_ever(world)) found.wrong = why;
        for_each_step(world, [&](const World& after, const char* step) {
            if (after.wrong && found.wrong.empty())
                found.wrong = std::string(after.wrong) + ", after " + step;
            if (known.insert(after.key()).second) ahead.push_back(after);
        });
    }
    found.worlds = known.size();
    return found;
}

// The states of the part that a state is of.
std::vector<State> siblings(State state) {
    static const std::pair<State, State> parts[] = {{State::free, State::failed},
                                                    {State::no_wish, State::dropped_untold},
                                                    {State::here, State::woken},
                                                    {State::unwanted, State::given_up}};
    std::vector<State> found;
    for (const auto& [first, last] : parts)
        for (auto at = static_cast<int>(first); at <= static_cast<int>(last); ++at)
            if (first <= state && state <= last) found.push_back(static_cast<State>(at));
    return found;
}

// Nobody shares the wish after these rules, and such a wish is dropped at once, told or not.
bool comes_to_the_same(const Rule& rule, State other) {
    return rule.to == State::no_wish && rule.on != Event::unwished &&
           (other == State::untold || other == State::told);
}

// Breaks each rule in each way that there is. Returns how many breaks the model does not notice.
int unnoticed(const Table& rules) {
    int missed = 0;
    int tried = 0;
    size_t most = 0;
    const auto attempt = [&](const Table& broken, size_t rule, const char* how, int what) {
        Finding found = explore(broken, 1);  // most need no second thread
        if (found.wrong.empty()) found = explore(broken, kThreads);
        most = std::max(most, found.worlds);
        ++tried;
        if (!found.wrong.empty()) return;
        std::printf("rule %zu (state %d, event %d): %s %d is not noticed\n", rule,
                    static_cast<int>(rules[rule].from), static_cast<int>(rules[rule].on), how,
                    what);
        ++missed;
    };
    for (size_t i = 0; i < rules.size(); ++i) {
        Table broken = rules;
        broken.erase(broken.begin() + static_cast<std::ptrdiff_t>(i));
        attempt(broken, i, "that it is missing", 0);
        for (const State other : siblings(rules[i].from)) {
            if (other == rules[i].to || comes_to_the_same(rules[i], other)) continue;
            broken = rules;
            broken[i].to = other;
            attempt(broken, i, "that it leads to", static_cast<int>(other));
        }
        for (int need = 1; need <= phos::safe_points::kSilent; need *= 2) {
            if (!(rules[i].needs & need)) continue;
            broken = rules;
            broken[i].needs ^= static_cast<uint8_t>(need);
            attempt(broken, i, "that it does not need", need);
        }
        if (rules[i].then == Event::none) continue;
        broken = rules;
        broken[i].then = Event::none;
        attempt(broken, i, "that nothing follows", 0);
    }
    std::printf("%d broken rules, found out in at most %zu worlds\n", tried, most);
    return missed;
}

}  // namespace

int main() {
    const Table rules = own_table();
    const Finding own = explore(rules, kThreads);
    std::printf("%zu rules, %zu worlds: %s\n", rules.size(), own.worlds,
                own.wrong.empty() ? "all is well" : own.wrong.c_str());
    if (!own.wrong.empty() || own.worlds < 10000) return 1;
    return unnoticed(rules) ? 1 : 0;
}

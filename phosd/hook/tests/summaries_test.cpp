// Tables of what kernels access: hostile ones are refused or do no harm, and a newer one may come
// while others read. What is computed from them, tests/native/analysis compares with phosd.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "ranges/launch_ranges.h"

namespace phos {

Driver driver;

namespace {

constexpr uint64_t kModule = 42;
const std::string kName = "kernel";
const std::vector<summaries::Parameter> kLayout{{0, 8}, {8, 8}, {16, 4}, {20, 4}};

uint64_t hash_of(const std::string& name) {
    uint64_t hash = 0xCBF2'9CE4'8422'2325u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100'0000'01B3u;
    return hash;
}

template <class Part>
void append(std::string* bytes, const std::vector<Part>& parts) {
    bytes->append(reinterpret_cast<const char*>(parts.data()), parts.size() * sizeof(Part));
}

// A kernel (a, b, n, rest) that reads a[i] and writes b[i] of the 4-byte elements i < n, and whose
// other accesses have a node of each kind. It writes `more` times to the same element, each time on
// a condition of its own.
std::string body(int64_t bytes_each, uint32_t more) {
    std::vector<table::Role> roles{{2, 1}, {3, 2}, {table::kNone, 1}};
    std::vector<table::Input> inputs{{16, 4}, {20, 4}, {0, 8}, {8, 8}};
    std::vector<uint32_t> refs{6, 10, 0, 3, 2, 0, 0, 12, 13};
    using table::Node;
    std::vector<Node> nodes{
        {table::kParameter, 0, 0, 0, 0, 0, 0, 0},         // 0: n
        {table::kPointer, 0, 0, 2, 0, 0, 0, 0},           // 1: a
        {table::kPointer, 0, 0, 3, 0, 0, 0, 0},           // 2: b
        {table::kThread, 0, 0, 0, 0, 0, 0, 0},            // 3: tid.x
        {table::kThread, 0, 0, 3, 0, 0, 0, 0},            // 4: ctaid.x
        {table::kDimension, 0, 0, 0, 0, 0, 0, 0},         // 5: ntid.x
        {table::kSum, 0, 2, 0, 0, 0, 3, 0},               // 6: tid.x + n + 3
        {table::kWord, 32, 0, 6, 0, 0, -(1ll << 31), 0},  // 7
        {table::kQuotient, 0, 0, 6, 0, 0, 3, 0},          // 8
        {table::kCommon, 0, 0, 6, 0, 5, 100, 0},          // 9
        {table::kAnything, 1, 0, 0, 0, 0, 0, 255},        // 10
        {table::kCarried, 64, 0, 1, 0, 5, 0, 0},          // 11: a, and ntid.x more each time
        {table::kProduct, 0, 2, 0, 0, 0, 0, 0},           // 12: (6) * (10)
        {table::kElsewhere, 0, 0, 6, 0, 0, 0, 0},         // 13
        {table::kLeast, 0, 2, 0, 0, 0, 0, 0},             // 14: of (6) and (10)
        {table::kGreatest, 0, 2, 0, 7, 0, 0, 0},          // 15: of (12) and (13)
        {table::kChoice, 0, 2, 0, 0, 0, 0, 0},            // 16
        {table::kSum, 0, 1, 0, 2, 0, 0, 0},               // 17: ctaid.x * ntid.x
        {table::kSum, 0, 2, 0, 3, 0, 0, 0},               // 18: a + each * tid.x
        {table::kSum, 0, 2, 0, 5, 0, 0, 0},               // 19: b + each * tid.x
        {table::kSum, 0, 8, 0, 7, 0, 0, 0},               // 20: a + all that there is
    };
    std::vector<table::Factor> factors{
        {1, 3, 0}, {1, 0, 0},          {1, 12, 0}, {1, 1, 0},  {bytes_each, 3, 0},
        {1, 2, 0}, {bytes_each, 3, 0}, {1, 11, 0}, {4, 7, 0},  {4, 8, 0},
        {4, 9, 0}, {4, 14, 0},         {4, 15, 0}, {4, 16, 0}, {4, 17, 0},
    };
    std::vector<table::Condition> conditions{
        {table::kLess, 1, 32, 3, 0, 3, 0, 0},  // tid.x < n
        {table::kLess, 0, 32, 6, 0, 6, 0, 0},
        {table::kUnequal, 1, 32, 10, 0, 10, 0, 0},
        {table::kNotMore, 0, 64, 11, 0, 5, 5, 0},
    };
    // Ways of a meeting: of condition 0, and of 1 and 2.
    const auto at = static_cast<uint32_t>(refs.size());
    refs.insert(refs.end(), {at + 4, 1, at + 5, 2, 0, 1, 2, 0, 1, 3, 0});
    std::vector<table::Key> keys{{table::kMeet, at, 2, 0}, {table::kIf, 0, 2, 0}};
    std::vector<table::Loop> loops{{at + 8, 2}};
    const table::List none{0, 0};
    const table::List first{2, 1};  // condition 0, key 0, loop 0
    std::vector<table::Access> accesses{
        {18, 4, 1, 0, 0, first, none, none, none, {4, 1}},
        {19, 4, 2, 0, 0, first, none, none, none, {3, 1}},
        {20, 4, 1, 2, 0, {at + 4, 3}, none, first, first, {4, 1}},
    };
    for (uint32_t i = 0; i < more; ++i) {
        accesses.push_back(accesses[1]);
        accesses.back().facts.at = static_cast<uint32_t>(refs.size());
        refs.push_back(0);
    }
    const table::Body head{static_cast<uint32_t>(roles.size()),
                           static_cast<uint32_t>(inputs.size()),
                           static_cast<uint32_t>(nodes.size()),
                           static_cast<uint32_t>(factors.size()),
                           static_cast<uint32_t>(conditions.size()),
                           static_cast<uint32_t>(keys.size()),
                           static_cast<uint32_t>(loops.size()),
                           static_cast<uint32_t>(accesses.size()),
                           static_cast<uint32_t>(refs.size()),
                           2,
                           {}};
    std::string bytes;
    append(&bytes, std::vector{head});
    append(&bytes, roles);
    append(&bytes, inputs);
    append(&bytes, nodes);
    append(&bytes, factors);
    append(&bytes, conditions);
    append(&bytes, keys);
    append(&bytes, loops);
    append(&bytes, accesses);
    append(&bytes, refs);
    bytes.resize((bytes.size() + 7) / 8 * 8);
    return bytes;
}

std::string make_table(int64_t bytes_each = 4, uint32_t more = 0) {
    const std::string inside = body(bytes_each, more);
    const size_t body_at = sizeof(table::Header) + sizeof(table::Kernel);
    const uint64_t size = body_at + inside.size() + kName.size();
    std::string bytes;
    append(&bytes,
           std::vector{table::Header{table::kMagic, table::kVersion, 90, kModule, size, 1, 0}});
    append(&bytes, std::vector{table::Kernel{
                       hash_of(kName), static_cast<uint32_t>(body_at + inside.size()),
                       static_cast<uint32_t>(kName.size()),
                       table::kReadsKnown | table::kWritesKnown | table::kAccesses, 24,
                       static_cast<uint32_t>(body_at), static_cast<uint32_t>(inside.size())}});
    return bytes + inside + kName;
}

Outcome add(const std::string& bytes) {
    const int file = memfd_create("table", MFD_CLOEXEC);
    CHECK(file >= 0 &&
          write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    uint64_t module = 0;
    const Outcome outcome = summaries::add(file, &module);
    close(file);
    return outcome;
}

constexpr uint64_t kA = 0x7000'0000'0000;
constexpr uint64_t kB = 0x7100'0000'0000;

ranges::Accesses evaluate(const summaries::Summary& summary, uint64_t n, bool remembered,
                          uint64_t rest = 0) {
    uint64_t inputs[table::kMaxInputs] = {n, rest, kA, kB};
    const ranges::Launch launch{{256, 1, 1, 3, 1, 1}, inputs};
    ranges::Accesses found;
    (remembered ? ranges::find : ranges::compute)(summary, launch, &found);
    return found;
}

void the_table_is_understood() {
    CHECK(summaries::check(reinterpret_cast<const unsigned char*>(make_table().data()),
                           make_table().size())
              .empty());
    CHECK(add(make_table()).count == 1);
    CHECK(!summaries::find(kModule, "other", kLayout) && !summaries::find(7, kName, kLayout));
    CHECK(!summaries::find(kModule, kName, {{0, 8}, {8, 8}}));  // without n
    const summaries::Summary* const summary = summaries::find(kModule, kName, kLayout);
    CHECK(summary && summary->pieces.size() == 4);
    for (const bool remembered : {false, true, true}) {
        const ranges::Accesses found = evaluate(*summary, 100, remembered);
        bool written = false;
        for (uint32_t i = 0; i < found.range_count; ++i) {
            const ranges::Range& one = found.ranges[i];
            if (one.use == table::kWritten)
                written = one.begin == 0 && one.length == 400 && one.base == 3;
        }
        CHECK(written && !(found.unknown & table::kWritten));
    }
    // No thread is below 0.
    const ranges::Accesses nothing = evaluate(*summary, 0, false);
    for (uint32_t i = 0; i < nothing.range_count; ++i)
        CHECK(!(nothing.ranges[i].use & table::kWritten));
}

// What takes too long before a launch is known by its origin then, and exactly later.
void a_hurried_launch_is_refined() {
    CHECK(!ranges::refine());
    CHECK(add(make_table(4, 200)).count == 1);
    const summaries::Summary& summary = *summaries::find(kModule, kName, kLayout);
    const auto is_exact = [](const ranges::Accesses& found) {
        uint32_t written = found.unknown;
        for (uint32_t i = 0; i < found.origin_count; ++i) written |= found.origins[i].use;
        return !(written & table::kWritten);
    };
    CHECK(!is_exact(evaluate(summary, 100, true)) && !is_exact(evaluate(summary, 101, true)));
    CHECK(is_exact(evaluate(summary, 100, false)));
    CHECK(ranges::refine() && is_exact(evaluate(summary, 100, true)));
    CHECK(is_exact(evaluate(summary, 100, true, 7)));  // which nothing reads
    CHECK(!ranges::refine() && is_exact(evaluate(summary, 101, true)));
    for (uint64_t n = 200; n < 1000; ++n)
        evaluate(summary, n, true);  // more than there is room for
    while (ranges::refine()) {
    }
    CHECK(is_exact(evaluate(summary, 200, true)) && !is_exact(evaluate(summary, 999, true)));
    CHECK(add(make_table()).count == 1);
}

void try_it(const std::string& bytes) {
    // A copy of its own, so that a byte behind its end is found out.
    const std::vector<unsigned char> exact(bytes.begin(), bytes.end());
    if (!summaries::check(exact.data(), exact.size()).empty()) return;
    const auto* const rows =
        reinterpret_cast<const table::Kernel*>(exact.data() + sizeof(table::Header));
    summaries::Summary summary{rows, {}, {}, {}};
    CHECK(summaries::check_body(exact.data() + rows->body_at, rows->body_size, &summary.view));
    for (const uint64_t n : {uint64_t{0}, uint64_t{100}, ~uint64_t{0}}) evaluate(summary, n, false);
}

void what_is_wrong_does_no_harm() {
    const std::string good = make_table();
    for (size_t size = 0; size < good.size(); size += 3) {
        CHECK(add(good.substr(0, size)).status != wire::Status::ok);
    }
    for (size_t at = 0; at + 4 <= good.size(); at += 4) {
        uint32_t old = 0;
        std::memcpy(&old, good.data() + at, 4);
        for (const uint32_t value : {0u, 1u, 2u, 3u, old + 1, old - 1, old << 1, 0x7FFF'FFFFu,
                                     0x8000'0000u, 0xFFFF'FFFFu, 0xFFu, 0x100u, 0x4000u}) {
            std::string bytes = good;
            std::memcpy(bytes.data() + at, &value, 4);
            try_it(bytes);
        }
    }
    std::mt19937 random(7);
    for (int round = 0; round < 20'000; ++round) {
        std::string bytes = good;
        for (unsigned i = 1 + random() % 4; i; --i)
            bytes[random() % bytes.size()] = static_cast<char>(random());
        try_it(bytes);
    }
    const std::string newer = [&] {
        std::string bytes = good;
        bytes[8] = 99;
        return bytes;
    }();
    CHECK(add(newer).text.find("version 99") != std::string::npos);
    int ends[2];
    uint64_t module = 0;
    OK(static_cast<CUresult>(pipe(ends)));
    CHECK(summaries::add(ends[0], &module).status == wire::Status::unsupported);
    close(ends[0]);
    close(ends[1]);
}

// Threads launch while newer tables come: each result is of the table that it was asked of.
void tables_come_while_others_read() {
    constexpr int kRounds = 200;
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < 3; ++thread)
        threads.emplace_back([&, thread] {
            while (!stop) {
                const auto& summary = *summaries::find(kModule, kName, kLayout);
                const auto each = static_cast<uint64_t>(summary.view.factors[6].factor);
                for (uint64_t n = 1 + thread; n < 200; n += 7) {
                    const ranges::Accesses found = evaluate(summary, n, true);
                    for (uint32_t i = 0; i < found.range_count; ++i) {
                        const ranges::Range& one = found.ranges[i];
                        CHECK(one.use != table::kWritten || one.length == each * (n - 1) + 4);
                    }
                }
            }
        });
    threads.emplace_back([&] {  // the hook's
        while (!stop) ranges::refine();
    });
    for (int round = 0; round < kRounds; ++round)
        CHECK(add(make_table(round % 2 ? 4 : 8)).count == 1);
    stop = true;
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace phos

int main() {
    phos::the_table_is_understood();
    phos::a_hurried_launch_is_refined();
    phos::what_is_wrong_does_no_harm();
    phos::tables_come_while_others_read();
    std::puts("ok");
}

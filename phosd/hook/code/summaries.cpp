#include "code/summaries.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/driver.h"

namespace phos::summaries {
namespace {

using table::kNone;
using wire::Status;

// Limits of all tables together, with those that were replaced: programs compile modules by the
// thousand.
constexpr uint64_t kMaxBytes = 256ull << 20;
constexpr size_t kMaxTables = 1u << 14;

struct Known {
    std::mutex mutex;
    std::unordered_map<uint64_t, const unsigned char*> tables;  // by module
    std::vector<std::unique_ptr<const Summary>> summaries;
    size_t count = 0;
    uint64_t bytes = 0;
};

// Never destroyed: a program may load modules while it exits.
Known& known() {
    static Known* const tables = new Known;
    return *tables;
}

uint64_t hash_of(std::string_view name) {
    uint64_t hash = 0xCBF2'9CE4'8422'2325u;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100'0000'01B3u;
    return hash;
}

const table::Header& header_of(const unsigned char* bytes) {
    return *reinterpret_cast<const table::Header*>(bytes);
}

const table::Kernel* kernels_of(const unsigned char* bytes) {
    return reinterpret_cast<const table::Kernel*>(bytes + sizeof(table::Header));
}

std::string_view name_of(const unsigned char* bytes, const table::Kernel& kernel) {
    return {reinterpret_cast<const char*>(bytes + kernel.name_at), kernel.name_size};
}

// Takes the parts of a body one after the other.
class Parts {
  public:
    Parts(const unsigned char* at, uint64_t size) : at_(at), left_(size) {}

    template <class Part>
    bool take(uint32_t count, uint32_t most, const Part** part) {
        const uint64_t size = count * uint64_t{sizeof(Part)};
        if (count > most || size > left_) return false;
        *part = reinterpret_cast<const Part*>(at_);
        at_ += size;
        left_ -= size;
        return true;
    }
    uint64_t left() const { return left_; }

  private:
    const unsigned char* at_;
    uint64_t left_;
};

// Whether every number in a body is one that may be used.
class Checker {
  public:
    explicit Checker(const View& view) : view_(view), body_(*view.body) {}

    bool run() const {
        return body_.compared <= body_.inputs &&
               all(view_.roles, body_.roles, [&](const table::Role& one) { return role(one); }) &&
               all(view_.inputs, body_.inputs,
                   [](const table::Input& one) { return input(one); }) &&
               all(view_.nodes, body_.nodes, [&](const table::Node& one) { return node(one); }) &&
               all(view_.conditions, body_.conditions,
                   [&](const table::Condition& one) { return condition(one); }) &&
               all(view_.keys, body_.keys, [&](const table::Key& one) { return key(one); }) &&
               all(view_.loops, body_.loops,
                   [&](const table::Loop& one) {
                       return list({one.at, one.count}, 1, body_.conditions);
                   }) &&
               all(view_.accesses, body_.accesses,
                   [&](const table::Access& one) { return access(one); });
    }

  private:
    template <class Part, class Fits>
    static bool all(const Part* parts, uint32_t count, Fits fits) {
        return std::all_of(parts, parts + count, fits);
    }

    // A list in the refs, every `each`th of which is less than `end`.
    bool list(const table::List& one, uint32_t each, uint32_t end) const {
        if (one.at > body_.refs || one.count > body_.refs - one.at || one.count % each)
            return false;
        for (uint32_t i = 0; i < one.count; i += each)
            if (view_.refs[one.at + i] >= end) return false;
        return true;
    }

    bool role(const table::Role& one) const {
        return (one.input == kNone || word(one.input)) && one.use >= 1 && one.use <= table::kUses;
    }

    static bool input(const table::Input& one) {
        return (one.size == 1 || one.size == 2 || one.size == 4 || one.size == 8) &&
               one.offset < 1u << 16;
    }

    bool word(uint32_t input) const {
        return input < body_.inputs && view_.inputs[input].size == 8;
    }

    bool node(const table::Node& one) const {
        const auto self = static_cast<uint32_t>(&one - view_.nodes);
        const auto before = [&](uint32_t node) { return node < self; };
        switch (one.kind) {
            case table::kSum:
                return one.at <= body_.factors && one.count <= body_.factors - one.at &&
                       all(view_.factors + one.at, one.count,
                           [&](const table::Factor& part) { return before(part.node); });
            case table::kParameter:
                return one.one < body_.inputs;
            case table::kPointer:
                return word(one.one) && one.one >= body_.compared;
            case table::kDimension:
                return one.one < 6;
            case table::kThread:
                return one.one < 7;
            case table::kProduct:
            case table::kLeast:
            case table::kGreatest:
                return one.count && list({one.at, one.count}, 1, self);
            case table::kWord:
                return before(one.one) && one.bits >= 1 && one.bits <= 64 &&
                       (one.low == 0 || static_cast<uint64_t>(one.low) == ~0ull << (one.bits - 1));
            case table::kQuotient:
                return before(one.one) && one.low > 0;
            case table::kCommon:
                return before(one.one) && before(one.other) && one.low >= 0;
            case table::kChoice:
                return one.one < body_.keys && one.count == view_.keys[one.one].count &&
                       list({one.at, one.count}, 1, self);
            case table::kElsewhere:
                return before(one.one);
            case table::kCarried:
                return before(one.one) && (one.other == kNone || before(one.other)) &&
                       one.at < body_.loops && (one.bits == 32 || one.bits == 64);
            case table::kAnything:
                return one.low <= one.high;
        }
        return false;
    }

    bool condition(const table::Condition& one) const {
        return one.how <= table::kUnequal && one.is_signed <= 1 && one.width >= 1 &&
               one.width <= 64 && one.one < body_.nodes && one.other < body_.nodes &&
               one.word_of_one < body_.nodes && one.word_of_other < body_.nodes;
    }

    bool key(const table::Key& one) const {
        switch (one.kind) {
            case table::kUndecided:
                return one.count >= 1 && one.count <= table::kMaxRefs;
            case table::kIf:
                return one.count == 2 && one.at < body_.conditions;
            case table::kMeet:
                if (!one.count || one.at > body_.refs || one.count > (body_.refs - one.at) / 2)
                    return false;
                for (uint32_t way = 0; way < one.count; ++way)
                    if (!list({view_.refs[one.at + 2 * way], view_.refs[one.at + 2 * way + 1]}, 1,
                              body_.conditions))
                        return false;
                return true;
        }
        return false;
    }

    bool access(const table::Access& one) const {
        if ((one.address != kNone && one.address >= body_.nodes) || one.use < 1 ||
            one.use > table::kUses || !list(one.facts, 1, body_.conditions) ||
            !list(one.decided, 2, body_.keys) || !list(one.choices, 1, body_.keys) ||
            !list(one.loops, 1, body_.loops) || !list(one.origins, 1, body_.inputs))
            return false;
        for (uint32_t i = 0; i < one.decided.count; i += 2) {
            const uint32_t* pair = view_.refs + one.decided.at + i;
            if (pair[1] >= view_.keys[pair[0]].count) return false;
        }
        return std::all_of(view_.refs + one.origins.at,
                           view_.refs + one.origins.at + one.origins.count,
                           [&](uint32_t input) { return word(input); });
    }

    const View& view_;
    const table::Body& body_;
};

// Returns which device the table is not for; nothing if it is for all: what runs where is not
// known.
std::string other_device(uint32_t architecture) {
    int count = 0;
    if (!driver.cuDeviceGetCount || driver.cuDeviceGetCount(&count) != CUDA_SUCCESS) return {};
    for (int device = 0; device < count; ++device) {
        int major = 0;
        int minor = 0;
        if (driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                                        device) != CUDA_SUCCESS ||
            driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                        device) != CUDA_SUCCESS ||
            static_cast<uint32_t>(10 * major + minor) != architecture)
            return "it is for sm_" + std::to_string(architecture) + ", and device " +
                   std::to_string(device) + " is of sm_" + std::to_string(10 * major + minor);
    }
    return {};
}

bool read_all(int descriptor, unsigned char* bytes, uint64_t size) {
    for (uint64_t at = 0; at < size;) {
        const ssize_t got = pread(descriptor, bytes + at, size - at, static_cast<off_t>(at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += static_cast<uint64_t>(got);
    }
    return true;
}

// Finds the bytes of all inputs among the parameters. False if there is one that is not there.
bool find_inputs(const View& view, const std::vector<Parameter>& parameters,
                 std::vector<Piece>* pieces) {
    for (uint32_t input = 0; input < view.body->inputs; ++input) {
        const auto [offset, size] = view.inputs[input];
        uint32_t at = offset;
        while (at < offset + size) {
            const auto holds = [&](const Parameter& one) {
                return one.offset <= at && at - one.offset < one.size;
            };
            const auto found = std::find_if(parameters.begin(), parameters.end(), holds);
            if (found == parameters.end()) return false;
            const uint32_t end = std::min(found->offset + found->size, offset + size);
            pieces->push_back({static_cast<uint16_t>(input), static_cast<uint8_t>(at - offset),
                               static_cast<uint8_t>(end - at),
                               static_cast<uint32_t>(found - parameters.begin()),
                               at - found->offset});
            at = end;
        }
    }
    return true;
}

}  // namespace

bool check_body(const unsigned char* bytes, uint64_t size, View* view) {
    Parts parts(bytes, size);
    if (size % 8 || !parts.take(1, 1, &view->body)) return false;
    const table::Body& body = *view->body;
    return parts.take(body.roles, table::kMaxInputs + 1, &view->roles) &&
           parts.take(body.inputs, table::kMaxInputs, &view->inputs) &&
           parts.take(body.nodes, table::kMaxNodes, &view->nodes) &&
           parts.take(body.factors, table::kMaxRefs, &view->factors) &&
           parts.take(body.conditions, table::kMaxNodes, &view->conditions) &&
           parts.take(body.keys, table::kMaxNodes, &view->keys) &&
           parts.take(body.loops, table::kMaxNodes, &view->loops) &&
           parts.take(body.accesses, table::kMaxAccesses, &view->accesses) &&
           parts.take(body.refs, table::kMaxRefs, &view->refs) && parts.left() < 8 &&
           Checker(*view).run();
}

std::string check(const unsigned char* bytes, uint64_t size) {
    if (size < sizeof(table::Header)) return "it is too short for one";
    const table::Header& header = header_of(bytes);
    if (header.magic != table::kMagic) return "it does not begin like one";
    if (header.version != table::kVersion)
        return "it is of version " + std::to_string(header.version) + ", and the hook reads " +
               std::to_string(table::kVersion);
    if (header.size != size) return "its size is not what it says";
    if (!header.module) return "it does not say of which module it is";
    const uint64_t rows = (size - sizeof header) / sizeof(table::Kernel);
    if (!header.kernel_count || header.kernel_count > table::kMaxKernels ||
        header.kernel_count > rows)
        return "it has no kernels, or too many";
    const table::Kernel* const kernels = kernels_of(bytes);
    const table::Kernel* before = nullptr;
    for (const table::Kernel* one = kernels; one != kernels + header.kernel_count; ++one) {
        if (one->name_at > size || one->name_size > size - one->name_at || !one->name_size ||
            one->name_size > table::kMaxName || one->body_at % 8 || one->body_at > size ||
            one->body_size > size - one->body_at)
            return "a kernel lies outside of it";
        const std::string_view name = name_of(bytes, *one);
        if (one->name_hash != hash_of(name)) return "a kernel's hash is not that of its name";
        if (before && (before->name_hash > one->name_hash ||
                       (before->name_hash == one->name_hash && name_of(bytes, *before) >= name)))
            return "its kernels are not in order";
        before = one;
        View view{};
        if (!check_body(bytes + one->body_at, one->body_size, &view))
            return "what it has of " + std::string(name.substr(0, 100)) + " is not well formed";
    }
    return {};
}

Outcome add(int descriptor, uint64_t* module) {
    struct stat info{};
    const auto failed = [](Status status, const std::string& why) {
        return Outcome{status, 0, "the table of what kernels access is refused: " + why};
    };
    if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode))
        return failed(Status::unsupported, "it is in no file of memory");
    const auto size = static_cast<uint64_t>(info.st_size);
    if (size < sizeof(table::Header) || size > table::kMaxBytes)
        return failed(Status::unsupported, "it has " + std::to_string(size) + " bytes");
    void* const copy =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return failed(Status::out_of_memory, "there is no memory for it");
    auto* const bytes = static_cast<unsigned char*>(copy);
    std::string wrong = read_all(descriptor, bytes, size) ? check(bytes, size) : "it is cut off";
    if (wrong.empty()) wrong = other_device(header_of(bytes).architecture);
    Known& tables = known();
    const std::lock_guard lock(tables.mutex);
    if (wrong.empty() && (tables.count == kMaxTables || size > kMaxBytes - tables.bytes))
        wrong = "the hook has " + std::to_string(tables.count) + " and no room for more";
    if (!wrong.empty()) {
        munmap(copy, size);
        return failed(Status::unsupported, wrong);
    }
    mprotect(copy, size, PROT_READ);
    const table::Header& header = header_of(bytes);
    tables.tables[header.module] = bytes;
    tables.bytes += size;
    ++tables.count;
    *module = header.module;
    return {Status::ok, header.kernel_count, {}};
}

const Summary* find(uint64_t module, const std::string& name,
                    const std::vector<Parameter>& parameters) {
    Known& tables = known();
    const unsigned char* bytes = nullptr;
    {
        const std::lock_guard lock(tables.mutex);
        const auto found = tables.tables.find(module);
        if (found == tables.tables.end()) return nullptr;
        bytes = found->second;
    }
    const table::Kernel* const first = kernels_of(bytes);
    const table::Kernel* const last = first + header_of(bytes).kernel_count;
    const uint64_t hash = hash_of(name);
    const table::Kernel* row = std::lower_bound(
        first, last, hash,
        [](const table::Kernel& one, uint64_t wanted) { return one.name_hash < wanted; });
    while (row != last && row->name_hash == hash && name_of(bytes, *row) != name) ++row;
    if (row == last || row->name_hash != hash) return nullptr;
    auto summary = std::make_unique<Summary>();
    summary->row = row;
    if (!check_body(bytes + row->body_at, row->body_size, &summary->view) ||
        !find_inputs(summary->view, parameters, &summary->pieces))
        return nullptr;
    const std::lock_guard lock(tables.mutex);
    return tables.summaries.emplace_back(std::move(summary)).get();
}

}  // namespace phos::summaries

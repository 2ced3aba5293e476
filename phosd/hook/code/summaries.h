// Keep the tables that phosd gives of what kernels access, and find the kernels in them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/outcome.h"
#include "protocol/summaries.h"

namespace phos::summaries {

// The parts of a kernel's body, which is checked.
struct View {
    const table::Body* body;
    const table::Role* roles;
    const table::Input* inputs;
    const table::Node* nodes;
    const table::Factor* factors;
    const table::Condition* conditions;
    const table::Key* keys;
    const table::Loop* loops;
    const table::Access* accesses;
    const uint32_t* refs;
};

// One parameter of a kernel: where it is in the parameter buffer, bytes.
struct Parameter {
    uint32_t offset;
    uint32_t size;
};

// Bytes of an input that are in one parameter.
struct Piece {
    uint16_t input;
    uint8_t begin;  // within the input
    uint8_t size;
    uint32_t parameter;
    uint32_t offset;  // within the parameter
};

// Some of the inputs, by their numbers.
struct InputSet {
    uint64_t words[table::kMaxInputs / 64];

    void add(uint32_t input) { words[input / 64] |= uint64_t{1} << input % 64; }
};

// Which inputs have decided what launches of a kernel access, each set of a way through its
// evaluation. Added to under a lock, read without one.
struct Deciding {
    static constexpr uint32_t kMost = 8;

    std::atomic<uint32_t> count{0};
    InputSet sets[kMost];
};

// What a table has of a kernel. Never freed, like the table: launches may be reading it.
struct Summary {
    const table::Kernel* row;
    View view;
    std::vector<Piece> pieces;  // of all inputs
    mutable Deciding deciding{};
};

// Takes the table in a file, a copy of which it checks: phosd may write to the file, and CRIU has
// no file to restore then. A newer table of a module replaces the one before. Sets `module`.
Outcome add(int descriptor, uint64_t* module);

// Returns what is known of a kernel with these parameters, as the driver has them; null if nothing
// is, or if its inputs are not all among them.
const Summary* find(uint64_t module, const std::string& name,
                    const std::vector<Parameter>& parameters);

// Returns the view of a table's kernel; null if the body is not well formed.
bool check_body(const unsigned char* bytes, uint64_t size, View* view);
// Returns what is wrong with a table; nothing if it can be used.
std::string check(const unsigned char* bytes, uint64_t size);

}  // namespace phos::summaries

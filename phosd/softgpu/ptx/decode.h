// Turns a kernel and every function it may call into a Program.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ast.h"
#include "handlers.h"
#include "lexer.h"
#include "program.h"

namespace phos::ptx {

// An instruction's modifiers, of which every one must be understood.
class Modifiers {
  public:
    explicit Modifiers(const ast::Statement& statement);
    bool take(std::string_view name);
    // The first of `names` that is there, or "".
    std::string_view take_any(std::initializer_list<std::string_view> names);
    Type type();  // takes the first type, or Type::none
    Type required_type();
    Rounding rounding();  // .rn .rz .rm .rp .rna
    void take_prefixed(std::string_view prefix);
    void finish() const;  // throws for what nobody took

  private:
    const ast::Statement& statement_;
    std::vector<std::string_view> left_;
};

class Decoder {
  public:
    // `addresses` are those of the module's variables, by index (0 for shared ones).
    Decoder(const ast::Module& module, const std::vector<uint64_t>& addresses)
        : module_(module), addresses_(addresses) {}
    std::unique_ptr<KernelCode> kernel(const ast::Function& entry);

  private:
    using Operand = ast::Operand;
    using Kind = ast::Operand::Kind;

    // One function's place in the program.
    struct Scope {
        const ast::Function* function = nullptr;
        std::vector<uint32_t> register_slots;
        std::vector<uint32_t> variable_offsets;  // in the frame, or in shared memory
        std::map<std::string_view, uint32_t> parameter_offsets;
        std::map<size_t, uint32_t> label_blocks;  // statement to block
        std::vector<uint32_t> fixups;             // blocks whose target is still a statement
    };

    // decode.cpp: the order of work.
    void find_reachable(const ast::Function& entry);
    void scan(const ast::Function& function, const Operand& operand, uint32_t scope);
    void reach(size_t function);
    void lay_out_shared();
    void lay_out_frame(size_t index);
    void mark_recursion();
    void function(size_t index);
    void statement(const ast::Statement& statement);
    void begin_block();
    Block& block() { return program_->blocks.back(); }
    void end_block(End end);

    // decode_operand.cpp: slots.
    [[noreturn]] void bad(const std::string& what) const;
    [[noreturn]] void unknown() const;
    std::string spelled() const;
    void need(size_t least, size_t most = 0) const;
    const Operand& operand(size_t i) const { return statement_->operands[i]; }
    uint32_t allocate(bool wide);
    uint32_t allocate_predicate();
    uint32_t constant(uint64_t bits, bool wide);
    uint32_t special(Special which);
    uint32_t source(const Operand& operand, Type type);
    uint32_t source(size_t i, Type type) { return source(operand(i), type); }
    uint32_t predicate(const Operand& operand);
    uint32_t target(const Operand& operand, Type type);
    uint32_t target(size_t i, Type type) { return target(operand(i), type); }
    uint32_t target_predicate(const Operand& operand);
    uint32_t immediate(const Operand& operand, Type type);
    uint32_t symbol(const Operand& operand, Type type);
    uint64_t integer(const Operand& operand) const;
    const ast::Variable* local_variable(std::string_view name, uint32_t& offset) const;
    const ast::Variable* parameter(std::string_view name, uint32_t& offset) const;
    uint32_t frame_address(uint32_t offset, bool wide);
    Handler handler(const std::string& base, Type type, const std::string& suffix = "") const;
    Op& emit(Handler handler, uint32_t d, uint32_t a = 0, uint32_t b = 0, uint32_t c = 0,
             uint64_t value = 0);
    Op& emit(const char* name, uint32_t d, uint32_t a = 0, uint32_t b = 0, uint32_t c = 0,
             uint64_t value = 0);
    void flush_targets();
    void set_rounding(Rounding rounding);

    // decode_arithmetic.cpp, decode_convert.cpp, decode_memory.cpp, decode_control.cpp: each
    // returns whether the instruction is one of its own.
    bool arithmetic();
    bool conversion();
    bool memory();
    bool control();

    void integer_operation(const std::string& name, unsigned operands, Modifiers& modifiers);
    void real_operation(const std::string& name, unsigned operands, Modifiers& modifiers,
                        Type type);
    void carry_operation(const std::string& name, Modifiers& modifiers);
    bool bit_operation(std::string_view name);
    void dot_product(const std::string& name);

    void move();
    void unpack(const Operand& vector, uint32_t from, Type type);
    uint32_t pack(const Operand& vector, Type type);
    void convert();
    uint32_t widened(uint32_t slot, Type type);
    void compare(bool set);
    uint32_t comparison(Modifiers& modifiers, Type type, std::string_view test);
    void compare_pair(Type type, std::string_view test, uint32_t* results);
    uint32_t combined(uint32_t test, uint32_t third, uint64_t how);
    void select();
    void select_by_sign();

    Access& access(const Operand& address, Space space, Type type, unsigned count);
    void qualifiers(Modifiers& modifiers);
    Space space(Modifiers& modifiers);
    void load();
    void store();
    void atomic(bool reduction);
    void address_conversion();
    void asynchronous_copy();

    void branch();
    void indexed_branch();
    void separate();
    void call();
    void barrier();
    void converge(uint32_t members);
    void shuffle();
    void vote();
    void match();
    void warp_reduction();
    uint32_t label(std::string_view name) const;

    const ast::Module& module_;
    const std::vector<uint64_t>& addresses_;
    Program* program_ = nullptr;
    std::vector<Scope> scopes_;      // one for each function of the program
    std::vector<size_t> reachable_;  // indices of the module's functions
    std::map<size_t, uint32_t> program_index_;
    std::map<size_t, std::vector<size_t>> calls_;
    bool calls_indirectly_ = false;
    std::map<std::string_view, uint32_t> shared_offsets_;  // of the module's shared variables
    std::vector<std::string_view> shared_used_;
    Scope* scope_ = nullptr;
    const ast::Statement* statement_ = nullptr;
    uint32_t guard_ = 0, flip_ = 0;
    uint32_t always_ = 0;  // a predicate that holds
    uint32_t carry_ = 0;   // the carry flags of add.cc
    uint32_t predicates_free_ = 0, predicate_next_ = 0;
    size_t targets_resolved_ = 0;  // lists of branch targets that name blocks already
    std::map<std::pair<uint64_t, bool>, uint32_t> constants_;
    std::map<Special, uint32_t> specials_;
    struct Widening {
        uint32_t to, from;
        bool is_signed;
    };
    std::vector<Widening> widenings_;
};

}  // namespace phos::ptx

// Kernels, modules and tensor maps as the hook knows them, with a driver made for the purpose.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#include "base/overrides.h"
#include "check.h"
#include "code/images.h"
#include "code/modules.h"
#include "write_sets/launches.h"

namespace phos {

Driver driver;

namespace {

using kernels::Kernel;

// One of the driver's functions, or a library's kernel, whose handle is its address.
struct Known {
    std::string name;
    std::vector<std::pair<size_t, size_t>> parameters;
    void* owner;
};
std::map<const void*, Known> functions;
std::map<const void*, Known> library_kernels;
std::atomic<int> asked{0};

template <class Handle>
Handle handle(uintptr_t number) {
    return reinterpret_cast<Handle>(number * 64);
}

CUresult tell_parameter(const std::map<const void*, Known>& table, const void* of, size_t index,
                        size_t* offset, size_t* size) {
    const auto found = table.find(of);
    if (found == table.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (index >= found->second.parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = found->second.parameters[index].first;
    *size = found->second.parameters[index].second;
    return CUDA_SUCCESS;
}

CUresult tell_name(const std::map<const void*, Known>& table, const void* of, const char** name) {
    const auto found = table.find(of);
    if (found == table.end()) return CUDA_ERROR_INVALID_HANDLE;
    ++asked;
    *name = found->second.name.c_str();
    return CUDA_SUCCESS;
}

template <class Owner>
CUresult tell_owner(const std::map<const void*, Known>& table, const void* of, Owner* owner) {
    const auto found = table.find(of);
    if (found == table.end()) return CUDA_ERROR_INVALID_HANDLE;
    *owner = static_cast<Owner>(found->second.owner);
    return CUDA_SUCCESS;
}

uintptr_t next_handle = 100'000;

void make_driver() {
    driver.cuFuncGetName = [](const char** name, CUfunction of) {
        return tell_name(functions, of, name);
    };
    driver.cuFuncGetParamInfo = [](CUfunction of, size_t index, size_t* offset, size_t* size) {
        return tell_parameter(functions, of, index, offset, size);
    };
    driver.cuFuncGetModule = [](CUmodule* module, CUfunction of) {
        return tell_owner(functions, of, module);
    };
    driver.cuKernelGetName = [](const char** name, CUkernel of) {
        return tell_name(library_kernels, of, name);
    };
    driver.cuKernelGetParamInfo = [](CUkernel of, size_t index, size_t* offset, size_t* size) {
        return tell_parameter(library_kernels, of, index, offset, size);
    };
    driver.cuKernelGetLibrary = [](CUlibrary* library, CUkernel of) {
        return tell_owner(library_kernels, of, library);
    };
    driver.cuModuleLoadData = [](CUmodule* module, const void*) {
        *module = handle<CUmodule>(next_handle++);
        return CUDA_SUCCESS;
    };
    driver.cuModuleLoad = [](CUmodule* module, const char*) {
        *module = handle<CUmodule>(next_handle++);
        return CUDA_SUCCESS;
    };
    driver.cuModuleUnload = [](CUmodule) { return CUDA_SUCCESS; };
    driver.cuKernelGetFunction = [](CUfunction* function, CUkernel kernel) {
        *function = handle<CUfunction>(next_handle++);
        functions[*function] = library_kernels.at(kernel);
        functions[*function].owner = nullptr;
        return CUDA_SUCCESS;
    };
    // Nothing of the address can be seen in what it makes.
    driver.cuTensorMapReplaceAddress = [](CUtensorMap* map, void* address) {
        for (size_t i = 0; i < 16; ++i)
            map->opaque[i] = reinterpret_cast<uint64_t>(address) * (2 * i + 3) >> 8;
        return CUDA_SUCCESS;
    };
}

uint64_t hash_of_image(const void* image) {
    CUmodule module = nullptr;
    OK(overrides::cuModuleLoadData(&module, image));
    const auto function = handle<CUfunction>(next_handle++);
    functions[function] = {"f", {}, module};
    return modules::hash_of(function);
}

void an_image_is_known_again() {
    std::string text(100'000, 'x');
    const uint64_t hash = hash_of_image(text.c_str());
    CHECK(hash && hash == hash_of_image(std::string(text).c_str()));
    for (const size_t changed : {size_t{0}, text.size() / 2, text.size() - 1}) {
        std::string other = text;
        other[changed] = 'y';
        CHECK(hash_of_image(other.c_str()) != hash);
    }
    CHECK(hash_of_image((text + "x").c_str()) != hash);

    char path[] = "/tmp/phos-image-XXXXXX";
    const int file = mkstemp(path);
    CHECK(write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    CUmodule module = nullptr;
    OK(overrides::cuModuleLoad(&module, path));
    const auto function = handle<CUfunction>(next_handle++);
    functions[function] = {"f", {}, module};
    CHECK(modules::hash_of(function) == hash);
    close(file);
    unlink(path);
    OK(overrides::cuModuleUnload(module));
    CHECK(modules::hash_of(function) == 0);

    struct {
        uint32_t magic = 0xBA55'ED50;
        uint16_t version = 1;
        uint16_t header_size = 16;
        uint64_t size = 40'000;
        unsigned char bytes[40'000] = {};
    } fat;
    struct {
        uint32_t magic = 0x4662'43B1;
        uint32_t version = 1;
        const void* data = nullptr;
        void* file = nullptr;
    } wrapper;
    wrapper.data = &fat;
    const uint64_t plain = hash_of_image(&fat);
    CHECK(plain && plain == hash_of_image(&wrapper));
    fat.bytes[sizeof fat.bytes - 1] = 1;
    CHECK(hash_of_image(&wrapper) != plain);
    const unsigned char strange[16] = {0x80, 1, 2, 3};
    CHECK(hash_of_image(strange) == 0);
}

void images_are_kept_until_they_are_read() {
    const size_t known = images::after(0).size();
    static const char in_object[] = "an image in this very object";
    std::string freed = "an image that the program frees";
    const uint64_t hash = hash_of_image(in_object);
    const uint64_t of_freed = hash_of_image(freed.c_str());
    hash_of_image(in_object);  // known
    const std::string content = freed;
    freed.assign(freed.size(), 'x');
    std::string large(9 << 20, 'y');
    hash_of_image(large.c_str());
    const std::vector<images::Image> found = images::after(known);
    CHECK(found.size() == 3 && images::after(known + 3).empty() && images::after(~0ul).empty());
    CHECK(found[0].hash == hash && found[0].held == wire::Held::in_object);
    CHECK(found[0].address == reinterpret_cast<uint64_t>(in_object));
    CHECK(found[1].hash == of_freed && found[1].held == wire::Held::in_copy);
    CHECK(std::string(reinterpret_cast<const char*>(found[1].address), found[1].size) == content);
    CHECK(found[2].held == wire::Held::not_kept && found[2].address == 0);
    for (char letter = 'a'; letter <= 'z'; ++letter) {
        large.assign(7 << 20, letter);
        hash_of_image(large.c_str());
    }
    uint64_t copied = 0;
    for (const images::Image& image : images::after(0))
        if (image.held == wire::Held::in_copy) copied += image.size;
    CHECK(copied > 32 << 20 && copied <= 64 << 20);
}

void a_function_is_what_the_driver_says() {
    const auto plain = handle<CUfunction>(1);
    functions[plain] = {"plain", {{0, 8}, {8, 4}, {16, 8}}, nullptr};
    Kernel* const kernel = kernels::find(plain);
    CHECK(kernel->name == "plain" && kernel->laid_out && kernel->parameters.size() == 3);
    CHECK(kernel->parameters[2].offset == 16 && kernel->parameters[2].size == 8);
    const int before = asked;
    CHECK(kernels::find(plain) == kernel && asked == before);

    // A library's kernel in the place of a function, and the function made from it.
    const auto library = handle<CUlibrary>(next_handle++);
    const auto of_library = handle<CUkernel>(2);
    library_kernels[of_library] = {"plain", functions[plain].parameters, library};
    CHECK(kernels::find(reinterpret_cast<CUfunction>(of_library)) == kernel);
    CUfunction made = nullptr;
    OK(overrides::cuKernelGetFunction(&made, of_library));
    CHECK(kernels::find(made) == kernel);

    const auto unknown = handle<CUfunction>(3);
    CHECK(!kernels::find(unknown)->laid_out && kernels::find(unknown)->name.empty());

    // The handle comes back for something else.
    CUmodule module = nullptr;
    OK(overrides::cuModuleLoadData(&module, "text"));
    functions[plain] = {"other", {{0, 4}}, nullptr};
    CHECK(kernels::find(plain) == kernel);
    OK(overrides::cuModuleUnload(module));
    CHECK(kernels::find(plain)->name == "other");
}

uint64_t name_hash(const char* name) {
    uint64_t hash = 0xCBF2'9CE4'8422'2325u;
    for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 0x100'0000'01B3u;
    return hash;
}

Kernel* make_kernel(const char* name, const char* image) {
    CUmodule module = nullptr;
    OK(overrides::cuModuleLoadData(&module, image));
    const auto function = handle<CUfunction>(next_handle++);
    functions[function] = {name, {{0, 8}}, module};
    return kernels::find(function);
}

void the_table_is_looked_up_by_name_and_module() {
    Kernel* const one = make_kernel("k", "image one");
    Kernel* const two = make_kernel("k", "image two");
    CHECK(one != two && one->module != two->module);
    const board::KernelRow rows[] = {
        {name_hash("k"), 0, board::kWritesOnly, 0, 1},
        {name_hash("k"), two->module, board::kWritesOnly, 0, 2},
        {name_hash("late"), 0, board::kSuspect, 0, 0},
    };
    const uint64_t generation = kernels::generation();
    kernels::arm(rows, 3);
    CHECK(kernels::generation() != generation);
    CHECK(one->flags == board::kWritesOnly && one->written == 1);
    CHECK(two->flags == board::kWritesOnly && two->written == 2);
    CHECK(make_kernel("late", "image one")->flags == board::kSuspect);
    const board::KernelRow mixed[] = {
        {name_hash("k"), two->module, board::kWritesOnly, 0, 2},
        {name_hash("k"), 0, board::kSuspect, 0, 0},
    };
    kernels::arm(mixed, 2);
    CHECK(one->flags == board::kSuspect);
    CHECK(two->flags == (board::kSuspect | board::kWritesOnly));
    kernels::arm(nullptr, 0);
    CHECK(one->flags == 0 && two->flags == 0);
}

void launches_are_counted_in_order() {
    Kernel* const one = make_kernel("first", "image");
    Kernel* const two = make_kernel("second", "image");
    kernels::count_launch(two, kernels::kUndecided);
    kernels::arm(nullptr, 0);
    CHECK(kernels::launched().empty());
    kernels::count_launch(one, kernels::kIdempotent);
    kernels::count_launch(two, kernels::kOverwrites, 5);
    kernels::count_launch(one, kernels::kUndecided);
    CHECK((kernels::launched() == std::vector<const Kernel*>{one, two}));
    CHECK(one->launches == 2 && two->launches == 5);
    CHECK(one->verdicts[kernels::kIdempotent] == 1 && two->verdicts[kernels::kOverwrites] == 5);
    kernels::count_afresh();
    CHECK(kernels::launched().empty() && two->verdicts[kernels::kOverwrites] == 0);
}

void a_tensor_map_is_an_address() {
    struct {
        uint64_t before[8] = {};
        alignas(alignof(CUtensorMap)) CUtensorMap map;
        CUtensorMap other;
    } parameter{};
    constexpr uint64_t kAt = 0x7f00'0000'1000;
    OK(overrides::cuTensorMapReplaceAddress(&parameter.map, reinterpret_cast<void*>(kAt)));
    using Words = std::vector<std::pair<uint64_t, uint64_t>>;
    Words seen;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&parameter);
    const auto look = [&](uint64_t offset) {
        seen.clear();
        write_sets::each_word_of(bytes, offset, sizeof parameter,
                                 [&](uint64_t address, uint64_t mask) {
                                     if (address == kAt) seen.emplace_back(address, mask);
                                 });
        return seen;
    };
    const uint64_t first = offsetof(decltype(parameter), map) / 8;
    CHECK((look(0) == Words{{kAt, 0xffffull << first}}));
    CHECK((look(512) == Words{{kAt, 0}}));  // beyond what a row can tell
    parameter.map.opaque[15] ^= 1;
    CHECK(look(0).empty());
    // The table is bounded, and the newest is always in it.
    for (uint64_t i = 1; i < 50'000; ++i) {
        OK(overrides::cuTensorMapReplaceAddress(&parameter.map, reinterpret_cast<void*>(i * 4096)));
        CHECK(tensor_maps::address_in(&parameter.map) == i * 4096);
    }
}

// Threads launch while others load and unload.
void readers_take_no_lock() {
    std::vector<CUfunction> mine;
    for (int i = 0; i < 64; ++i) {
        mine.push_back(handle<CUfunction>(next_handle++));
        functions[mine.back()] = {"kernel " + std::to_string(i), {{0, 8}}, nullptr};
    }
    kernels::arm(nullptr, 0);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    constexpr uint64_t kLaunches = 20'000;
    for (int thread = 0; thread < 3; ++thread)
        threads.emplace_back([&, thread] {
            for (uint64_t i = 0; i < kLaunches; ++i) {
                Kernel* const kernel = kernels::find(mine[(i + thread) % mine.size()]);
                CHECK(kernel->name == "kernel " + std::to_string((i + thread) % mine.size()));
                kernels::count_launch(kernel, kernels::kIdempotent);
            }
        });
    std::thread unloader([&] {
        while (!stop) {
            kernels::forget_functions();
            usleep(200);
        }
    });
    for (std::thread& thread : threads) thread.join();
    stop = true;
    unloader.join();
    uint64_t launches = 0;
    for (const Kernel* kernel : kernels::launched()) launches += kernel->launches;
    CHECK(launches == 3 * kLaunches && kernels::launched().size() == mine.size());
}

}  // namespace
}  // namespace phos

int main() {
    phos::make_driver();
    phos::an_image_is_known_again();
    phos::images_are_kept_until_they_are_read();
    phos::a_function_is_what_the_driver_says();
    phos::the_table_is_looked_up_by_name_and_module();
    phos::launches_are_counted_in_order();
    phos::a_tensor_map_is_an_address();
    phos::readers_take_no_lock();
    std::puts("ok");
}

// Finds the PTX in what a program hands to cuModuleLoadData: PTX text, a fat binary, or its
// wrapper.
#include <cstring>

#include "core/error.h"
#include "core/module.h"

namespace phos::softgpu {
namespace {

struct FatWrapper {
    uint32_t magic;
    uint32_t version;
    const void* data;
    const void* names;
};
constexpr uint32_t kWrapperMagic = 0x466243b1;

struct FatHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t header_bytes;
    uint64_t bytes;  // of all entries
};
constexpr uint32_t kFatMagic = 0xba55ed50;

struct FatEntry {
    uint16_t kind;
    uint16_t version;
    uint32_t header_bytes;
    uint64_t bytes;  // of the payload, padded
    uint32_t compressed_bytes;
    uint32_t options_offset;
    uint16_t minor, major;
    uint32_t architecture;
    uint32_t name_offset, name_bytes;
    uint64_t flags;
    uint64_t reserved;
    uint64_t plain_bytes;
};
constexpr uint16_t kPtx = 1;
constexpr uint64_t kCompressedLz4 = 0x2000, kCompressedOther = 0x8000;
constexpr uint64_t kMaxPlain = 256ull << 20;

// One LZ4 block; empty when the input is damaged.
std::string lz4(const uint8_t* at, size_t size, size_t plain) {
    const uint8_t* end = at + size;
    std::string out;
    out.reserve(plain);
    const auto length = [&](size_t first) {
        if (first < 15) return first;
        uint8_t more = 255;
        while (more == 255 && at < end) first += more = *at++;
        return first;
    };
    while (at < end) {
        const uint8_t token = *at++;
        const size_t literals = length(token >> 4);
        if (literals > static_cast<size_t>(end - at) || out.size() + literals > plain) return {};
        out.append(reinterpret_cast<const char*>(at), literals);
        at += literals;
        if (end - at < 2) break;
        const size_t back = at[0] | at[1] << 8;
        at += 2;
        const size_t match = length(token & 15) + 4;
        if (back == 0 || back > out.size() || out.size() + match > plain) return {};
        for (size_t i = 0; i < match; ++i) out += out[out.size() - back];
    }
    return out;
}

std::string ptx_in(const FatHeader& header, std::string& log) {
    const auto* at = reinterpret_cast<const uint8_t*>(&header) + header.header_bytes;
    const uint8_t* end = at + header.bytes;
    std::string best;
    uint32_t best_architecture = 0;
    while (end - at >= static_cast<ptrdiff_t>(sizeof(FatEntry))) {
        FatEntry entry;
        std::memcpy(&entry, at, sizeof entry);
        if (entry.header_bytes < 32 ||
            entry.bytes > static_cast<uint64_t>(end - at) - entry.header_bytes)
            break;
        const uint8_t* payload = at + entry.header_bytes;
        at = payload + entry.bytes;
        // Newer code than the device claims is not for it; of the rest, the newest is best.
        if (entry.kind != kPtx || entry.architecture > 90 || entry.architecture < best_architecture)
            continue;
        std::string text(reinterpret_cast<const char*>(payload), entry.bytes);
        if (entry.flags & kCompressedOther) {
            log =
                "the fat binary's PTX is compressed in a way this library does not read; "
                "compile it with --no-compress or -compress-mode=none";
            continue;
        }
        if (entry.flags & kCompressedLz4) {
            if (entry.plain_bytes > kMaxPlain || entry.compressed_bytes > entry.bytes) continue;
            text = lz4(payload, entry.compressed_bytes, entry.plain_bytes);
        }
        best = text.c_str();  // up to its zero
        best_architecture = entry.architecture;
    }
    return best;
}

}  // namespace

std::string ptx_of(const void* image, std::string& log) {
    require(image != nullptr);
    uint32_t magic = 0;
    // A PTX text may be shorter than this, but its zero is within it.
    std::memcpy(&magic, image, strnlen(static_cast<const char*>(image), sizeof magic));
    if (magic == kWrapperMagic) {
        image = static_cast<const FatWrapper*>(image)->data;
        require(image != nullptr, CUDA_ERROR_INVALID_IMAGE);
        std::memcpy(&magic, image, sizeof magic);
    }
    if (magic == kFatMagic) {
        std::string ptx = ptx_in(*static_cast<const FatHeader*>(image), log);
        if (!ptx.empty()) return ptx;
        if (log.empty())
            log =
                "the fat binary holds no PTX; the software GPU runs PTX only, so compile with "
                "-gencode arch=compute_90,code=compute_90";
        fail(CUDA_ERROR_NO_BINARY_FOR_GPU);
    }
    if (std::memcmp(&magic, "\177ELF", sizeof magic) == 0) {
        log =
            "this is machine code for a real GPU (a cubin); the software GPU runs PTX only, so "
            "compile to PTX";
        explain(log);
        fail(CUDA_ERROR_NO_BINARY_FOR_GPU);
    }
    return static_cast<const char*>(image);
}

}  // namespace phos::softgpu

// Tensor maps as values that a program can make and pass to a kernel. Nothing here reads one: the
// interpreter has no tensor instructions. What is checked is what cuda.h asks for.
#include "api/api.h"

using namespace phos::softgpu;

namespace {

constexpr unsigned kMaxRank = 5;

// The 128 bytes. As in the driver's maps, the global address comes first.
struct Encoding {
    uint64_t address;
    uint64_t strides[kMaxRank - 1];  // bytes
    uint32_t dims[kMaxRank];         // less one, elements
    uint16_t box[kMaxRank];          // tiled: elements; im2col: corners, then channels and pixels
    uint8_t steps[kMaxRank];
    uint8_t type, rank, interleave, swizzle, promotion, fill;
};
static_assert(sizeof(Encoding) <= sizeof(CUtensorMap));

bool packed_to_16(CUtensorMapDataType type) {
    return type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B ||
           type == CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B;
}

bool packed(CUtensorMapDataType type) {
    return packed_to_16(type) || type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B;
}

bool real(CUtensorMapDataType type) {
    return type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && !packed(type);
}

// Bits of an element in shared memory.
unsigned bits(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B:
            return 4;
        case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B:
        case CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B:
            return 8;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
            return 16;
        case CU_TENSOR_MAP_DATA_TYPE_UINT64:
        case CU_TENSOR_MAP_DATA_TYPE_INT64:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
            return 64;
        default:
            return 32;
    }
}

unsigned swizzle_bytes(CUtensorMapSwizzle swizzle) {
    return swizzle == CU_TENSOR_MAP_SWIZZLE_32B   ? 32
           : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                  : 128;
}

void check_address(const void* address, CUtensorMapDataType type,
                   CUtensorMapInterleave interleave) {
    const bool wide = interleave == CU_TENSOR_MAP_INTERLEAVE_32B || packed_to_16(type);
    require(reinterpret_cast<uint64_t>(address) % (wide ? 32 : 16) == 0);
}

// What the forms have in common. `inner` is how many elements of the first dimension are moved at
// a time.
Encoding encode(const CUtensorMap* map, CUtensorMapDataType type, unsigned rank, void* address,
                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* steps,
                uint64_t inner, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    current();
    require(map != nullptr);  // the driver takes one of any alignment
    require(unsigned(type) <= CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B);
    require(unsigned(interleave) <= CU_TENSOR_MAP_INTERLEAVE_32B);
    require(unsigned(swizzle) <= CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B);
    require(unsigned(promotion) <= CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    require(fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
            (fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA && real(type)));
    require(rank <= kMaxRank && rank >= (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE ? 1 : 3));
    require(dims && steps && (strides || rank == 1));
    check_address(address, type, interleave);
    require(interleave != CU_TENSOR_MAP_INTERLEAVE_32B || swizzle == CU_TENSOR_MAP_SWIZZLE_32B);
    require(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE ||
            type != CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B);
    require(!packed_to_16(type) || (dims[0] % 128 == 0 && inner == 128));
    require(!packed(type) || dims[0] % 2 == 0);
    if (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE) {
        require(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ||
                inner * bits(type) <= 8ull * swizzle_bytes(swizzle));
    }
    Encoding encoding{};
    encoding.address = reinterpret_cast<uint64_t>(address);
    const unsigned unit =
        interleave == CU_TENSOR_MAP_INTERLEAVE_32B || packed_to_16(type) ? 32 : 16;
    for (unsigned i = 0; i < rank; ++i) {
        require(dims[i] >= 1 && dims[i] <= 1ull << 32);
        require(steps[i] >= 1 && steps[i] <= 8);
        encoding.dims[i] = static_cast<uint32_t>(dims[i] - 1);
        encoding.steps[i] = static_cast<uint8_t>(steps[i]);
        if (i == rank - 1) break;
        require(strides[i] % unit == 0 && strides[i] < 1ull << 40);
        encoding.strides[i] = strides[i];
    }
    encoding.type = static_cast<uint8_t>(type);
    encoding.rank = static_cast<uint8_t>(rank);
    encoding.interleave = static_cast<uint8_t>(interleave);
    encoding.swizzle = static_cast<uint8_t>(swizzle);
    encoding.promotion = static_cast<uint8_t>(promotion);
    encoding.fill = static_cast<uint8_t>(fill);
    return encoding;
}

void store(CUtensorMap* map, const Encoding& encoding) {
    *map = {};
    std::memcpy(map, &encoding, sizeof encoding);
}

}  // namespace

API(cuTensorMapEncodeTiled,
    (CUtensorMap * map, CUtensorMapDataType type, cuuint32_t rank, void* address,
     const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
     const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
     CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill),
    (map, type, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill)) {
    require(box != nullptr);
    require(interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || box[0] * bits(type) % 128 == 0);
    Encoding encoding = encode(map, type, rank, address, dims, strides, steps, box[0], interleave,
                               swizzle, promotion, fill);
    for (unsigned i = 0; i < rank; ++i) {
        require(box[i] >= 1 && box[i] <= 256);
        encoding.box[i] = static_cast<uint16_t>(box[i]);
    }
    store(map, encoding);
}

API(cuTensorMapEncodeIm2col,
    (CUtensorMap * map, CUtensorMapDataType type, cuuint32_t rank, void* address,
     const cuuint64_t* dims, const cuuint64_t* strides, const int* lower, const int* upper,
     cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps,
     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
     CUtensorMapFloatOOBfill fill),
    (map, type, rank, address, dims, strides, lower, upper, channels, pixels, steps, interleave,
     swizzle, promotion, fill)) {
    require(rank >= 3 && lower && upper && channels <= 256 && pixels <= 1024);
    Encoding encoding = encode(map, type, rank, address, dims, strides, steps, channels, interleave,
                               swizzle, promotion, fill);
    const unsigned corners = rank - 2, width = 16 / corners;  // dimensions, and bits for each
    const int least = -(1 << (width - 1)), most = -least - 1;
    for (unsigned i = 0; i < corners; ++i) {
        require(lower[i] >= least && lower[i] <= most && upper[i] >= least && upper[i] <= most);
        const unsigned mask = (1u << width) - 1;
        encoding.box[0] |= static_cast<uint16_t>((unsigned(lower[i]) & mask) << (i * width));
        encoding.box[1] |= static_cast<uint16_t>((unsigned(upper[i]) & mask) << (i * width));
    }
    encoding.box[2] = static_cast<uint16_t>(channels);
    encoding.box[3] = static_cast<uint16_t>(pixels);
    store(map, encoding);
}

API(cuTensorMapReplaceAddress, (CUtensorMap * map, void* address), (map, address)) {
    current();
    require(map != nullptr);
    Encoding encoding;
    std::memcpy(&encoding, map, sizeof encoding);
    check_address(address, static_cast<CUtensorMapDataType>(encoding.type),
                  static_cast<CUtensorMapInterleave>(encoding.interleave));
    encoding.address = reinterpret_cast<uint64_t>(address);
    store(map, encoding);
}

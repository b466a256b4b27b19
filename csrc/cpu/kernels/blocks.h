// Rows as files store them, read 32 columns at a time as float32: plain numbers and ggml's blocks.
//
// Formats: ggml-common.h and the dequantize_row_* of ggml-quants.c; the order of operations is theirs, so the floats are too.
// Internal linkage, and each instruction set's own namespace: their files include this with flags of their own.
#pragma once

#include <cstdint>
#include <cstring>

#include "../include/astrai_cpu.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // about vectors that cross from one file to another; none do
#endif

#if defined(ASTRAI_ISA)
#define ASTRAI_HERE astrai::ASTRAI_ISA
#else
#define ASTRAI_HERE astrai
#endif

namespace ASTRAI_HERE::packing {

constexpr int kTile = 16;   // rows
constexpr int kGroup = 32;  // columns

template <class T> static inline T read(const void *p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
template <class To, class From> static inline To bits_as(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    return read<To>(&from);
}

static inline float half_to_float(uint16_t half) {
    const uint32_t rest = uint32_t(half & 0x7fff) << 13, exponent = half & 0x7c00;
    const uint32_t normal = rest + (exponent == 0x7c00 ? 224u << 23 : 112u << 23);
    const float small = bits_as<float>(rest + (113u << 23)) - bits_as<float>(113u << 23);
    const uint32_t bits = exponent ? normal : bits_as<uint32_t>(small);
    return bits_as<float>(bits | uint32_t(half & 0x8000) << 16);
}

// To nearest, ties to even; from 65520 on infinity.
static inline uint16_t float_to_half(float x) {
    uint32_t bits = bits_as<uint32_t>(x);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // one unit of the last place of 0.5 is the smallest float16
        return uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(bits) + 0.5f) - 0x3f000000));
    }
    return uint16_t(sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

static inline float bfloat16_to_float(uint16_t x) { return bits_as<float>(uint32_t(x) << 16); }
static inline float half_at(const uint8_t *p) { return half_to_float(read<uint16_t>(p)); }

// Bytes of one row; 0: rows of `cols` columns cannot be stored like that, or nobody knows the format.
static inline int64_t source_row_bytes(int from, int64_t cols) {
    switch (from) {
        case ASTRAI_FROM_FLOAT32: return cols * 4;
        case ASTRAI_FROM_BFLOAT16:
        case ASTRAI_FROM_FLOAT16: return cols * 2;
        case ASTRAI_FROM_Q8_0: return cols % 32 ? 0 : cols / 32 * 34;
        case ASTRAI_FROM_Q4_0: return cols % 32 ? 0 : cols / 32 * 18;
        case ASTRAI_FROM_Q4_1: return cols % 32 ? 0 : cols / 32 * 20;
        case ASTRAI_FROM_Q5_0: return cols % 32 ? 0 : cols / 32 * 22;
        case ASTRAI_FROM_Q5_1: return cols % 32 ? 0 : cols / 32 * 24;
        case ASTRAI_FROM_Q4_K: return cols % 256 ? 0 : cols / 256 * 144;
        case ASTRAI_FROM_Q5_K: return cols % 256 ? 0 : cols / 256 * 176;
        case ASTRAI_FROM_Q6_K: return cols % 256 ? 0 : cols / 256 * 210;
    }
    return 0;
}

// One group of a K block of 4 or 5 bits: weight = scale * code - least.
struct KGroup {
    float scale, least;
};
static inline KGroup k_group(const uint8_t *block, int sub) {
    const uint8_t *packed = block + 4;
    const int scale = sub < 4 ? packed[sub] & 63 : (packed[sub + 4] & 15) | (packed[sub - 4] >> 6) << 4;
    const int least = sub < 4 ? packed[sub + 4] & 63 : packed[sub + 4] >> 4 | (packed[sub] >> 6) << 4;
    return {half_at(block) * float(scale), half_at(block + 2) * float(least)};
}

// Columns 32 * group.. of a row, n of them (always 32 from blocks).
using LoadGroup = void (*)(const uint8_t *row, int group, int n, float *out);

static inline void load_float32(const uint8_t *row, int group, int n, float *out) {
    std::memcpy(out, row + size_t(group) * 128, size_t(n) * 4);
}
static inline void load_bfloat16(const uint8_t *row, int group, int n, float *out) {
    for (int k = 0; k < n; k++) out[k] = bfloat16_to_float(read<uint16_t>(row + size_t(group) * 64 + size_t(k) * 2));
}
static inline void load_float16(const uint8_t *row, int group, int n, float *out) {
    for (int k = 0; k < n; k++) out[k] = half_at(row + size_t(group) * 64 + size_t(k) * 2);
}
static inline void load_q8_0(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group) * 34;
    const float scale = half_at(block);
    for (int k = 0; k < 32; k++) out[k] = scale * float(int8_t(block[2 + k]));
}
static inline void load_q4_0(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group) * 18;
    const float scale = half_at(block);
    for (int k = 0; k < 16; k++) {
        out[k] = scale * float((block[2 + k] & 15) - 8);
        out[k + 16] = scale * float((block[2 + k] >> 4) - 8);
    }
}
static inline void load_q4_1(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group) * 20;
    const float scale = half_at(block), least = half_at(block + 2);
    for (int k = 0; k < 16; k++) {
        out[k] = scale * float(block[4 + k] & 15) + least;
        out[k + 16] = scale * float(block[4 + k] >> 4) + least;
    }
}
static inline void load_q5_0(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group) * 22;
    const float scale = half_at(block);
    const uint32_t fifth = read<uint32_t>(block + 2);
    for (int k = 0; k < 16; k++) {
        out[k] = scale * float(int((block[6 + k] & 15) | (fifth >> k & 1) << 4) - 16);
        out[k + 16] = scale * float(int(block[6 + k] >> 4 | (fifth >> (k + 16) & 1) << 4) - 16);
    }
}
static inline void load_q5_1(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group) * 24;
    const float scale = half_at(block), least = half_at(block + 2);
    const uint32_t fifth = read<uint32_t>(block + 4);
    for (int k = 0; k < 16; k++) {
        out[k] = scale * float(int((block[8 + k] & 15) | (fifth >> k & 1) << 4)) + least;
        out[k + 16] = scale * float(int(block[8 + k] >> 4 | (fifth >> (k + 16) & 1) << 4)) + least;
    }
}
static inline void load_q4_k(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group / 8) * 144;
    const int sub = group % 8, shift = sub % 2 * 4;
    const KGroup of = k_group(block, sub);
    const uint8_t *codes = block + 16 + sub / 2 * 32;
    for (int k = 0; k < 32; k++) out[k] = of.scale * float(codes[k] >> shift & 15) - of.least;
}
static inline void load_q5_k(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group / 8) * 176;
    const int sub = group % 8, shift = sub % 2 * 4;
    const KGroup of = k_group(block, sub);
    const uint8_t *fifth = block + 16, *codes = block + 48 + sub / 2 * 32;
    for (int k = 0; k < 32; k++) out[k] = of.scale * float((codes[k] >> shift & 15) | (fifth[k] >> sub & 1) << 4) - of.least;
}
static inline void load_q6_k(const uint8_t *row, int group, int, float *out) {
    const uint8_t *block = row + size_t(group / 8) * 210;
    const int half = group % 8 / 4, quarter = group % 4;
    const uint8_t *low = block + half * 64 + quarter % 2 * 32, *high = block + 128 + half * 32;
    const float whole = half_at(block + 208);
    for (int k = 0; k < 32; k++) {
        const float scale = whole * float(int8_t(block[192 + half * 8 + quarter * 2 + k / 16]));
        const int code = (low[k] >> quarter / 2 * 4 & 15) | (high[k] >> quarter * 2 & 3) << 4;
        out[k] = scale * float(code - 32);
    }
}

static inline LoadGroup loader(int from) {
    switch (from) {
        case ASTRAI_FROM_FLOAT32: return load_float32;
        case ASTRAI_FROM_BFLOAT16: return load_bfloat16;
        case ASTRAI_FROM_FLOAT16: return load_float16;
        case ASTRAI_FROM_Q8_0: return load_q8_0;
        case ASTRAI_FROM_Q4_0: return load_q4_0;
        case ASTRAI_FROM_Q4_1: return load_q4_1;
        case ASTRAI_FROM_Q5_0: return load_q5_0;
        case ASTRAI_FROM_Q5_1: return load_q5_1;
        case ASTRAI_FROM_Q4_K: return load_q4_k;
        case ASTRAI_FROM_Q5_K: return load_q5_k;
        case ASTRAI_FROM_Q6_K: return load_q6_k;
    }
    return nullptr;
}

}  // namespace ASTRAI_HERE::packing

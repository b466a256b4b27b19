// Rows of activations in the form that a matrix multiplies: bytes with a scale for 32 of them, pairs of bfloat16, or floats.
#pragma once

#include <cstring>

namespace astrai::ASTRAI_ISA {

constexpr int kGroup = 32;

constexpr int padded(int n, int unit) { return (n + unit - 1) / unit * unit; }

// `cols` is a whole number of groups; what a matrix's padding meets is zero.
struct Rows {
    int format;      // of the matrices that they are for
    int cols;
    int8_t *codes;      // [rows, cols]               int8, int4
    float *scales;      // [rows, cols / 32]
    int32_t *starts;    // [rows, cols / 32]: what the integer sums begin with, so that codes' bias falls out
    float *sums;        // [rows, cols / 32]: sum of the group's activations, for offsets
    uint16_t *halves;   // [rows, cols]               bfloat16
    float *floats;      // [rows, cols]               float32

    int groups() const { return cols / kGroup; }

    static size_t bytes(int rows, int cols) {  // enough for every format
        return size_t(rows) * padded(cols, kGroup) * 4 + 256;
    }

    static Rows at(void *memory, int rows, int cols, int format) {
        Rows r{};
        r.format = format, r.cols = padded(cols, kGroup);
        size_t n = size_t(rows) * r.cols, groups = n / kGroup;
        if (format == ASTRAI_FLOAT32) r.floats = static_cast<float *>(memory);
        if (format == ASTRAI_BFLOAT16) r.halves = static_cast<uint16_t *>(memory);
        if (format == ASTRAI_INT8 || format == ASTRAI_INT4) {
            r.codes = static_cast<int8_t *>(memory);
            r.scales = reinterpret_cast<float *>(r.codes + n);
            r.starts = reinterpret_cast<int32_t *>(r.scales + groups);
            r.sums = reinterpret_cast<float *>(r.starts + groups);
        }
        return r;
    }
};

// 32 numbers to bytes: q = round(x / scale), scale = largest magnitude / 127. A group that holds NaN or infinity gets a scale
// that is not finite, so that the fault reaches the logits.
inline void quantise_group(const float *x, int format, int8_t *codes, float *scale, int32_t *start, float *total) {
    F32 a = load(x), b = load(x + kLanes);
    int32_t bits = largest(max_magnitude(max_magnitude(zero_int(), a), b));
    float most;
    std::memcpy(&most, &bits, 4);
    bool finite = bits < 0x7f800000;
    F32 factor = set1(finite && most > 1e-30f ? 127.0f / most : 0.0f);
    if (!finite) a = b = zero();
    I32 first = to_int(mul(a, factor)), second = to_int(mul(b, factor));
    store_int8(codes, first), store_int8(codes + kLanes, second);
    int32_t sum_of_codes = sum(add(first, second));
    *scale = most * (1.0f / 127.0f);
    *start = -(format == ASTRAI_INT4 ? 8 : kWeightBias) * sum_of_codes;
    *total = *scale * float(sum_of_codes);
}

// One group in whatever form the rows have.
inline void prepare_group(const Rows &rows, size_t group, const float *x) {
    if (rows.codes) {
        quantise_group(x, rows.format, rows.codes + group * kGroup, rows.scales + group, rows.starts + group, rows.sums + group);
    } else if (rows.halves) {
        store_bfloat16(rows.halves + group * kGroup, load(x));
        store_bfloat16(rows.halves + group * kGroup + kLanes, load(x + kLanes));
    } else {
        F32 a = load(x), b = load(x + kLanes);
        store(rows.floats + group * kGroup, a), store(rows.floats + group * kGroup + kLanes, b);
    }
}

// Row r of `to` from n floats; columns past n become zero.
inline void prepare_row(const Rows &to, int r, const float *x, int n) {
    const Rows rows = to;  // a copy of its own: stores of bytes might change any other
    const size_t first = size_t(r) * size_t(rows.groups());
    const int whole = n / kGroup;
    for (int g = 0; g < whole; g++) prepare_group(rows, first + size_t(g), x + g * kGroup);
    for (int g = whole; g < rows.groups(); g++) {
        alignas(64) float tail[kGroup] = {};
        if (g == whole) std::memcpy(tail, x + g * kGroup, size_t(n - whole * kGroup) * 4);
        prepare_group(rows, first + size_t(g), tail);
    }
}

}  // namespace astrai::ASTRAI_ISA

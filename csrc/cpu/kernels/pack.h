// Packs weights into the tiles of astrai_matrix, and back: a few rows of one tile and one group of 32 columns at a time, the
// rows side by side. No sum runs across rows, so a row becomes the same whoever its neighbours are, whoever packs it, and
// however wide the registers are.
#pragma once

#include <cmath>
#include <stdexcept>

#include "blocks.h"

namespace ASTRAI_HERE::packing {

#if defined(__AVX512F__)
constexpr int kSide = 16;  // rows that lie side by side in a register; a tile is a few of those
#elif defined(__AVX2__)
constexpr int kSide = 8;
#else
constexpr int kSide = 4;
#endif
typedef float Floats __attribute__((vector_size(kSide * 4)));
typedef int32_t Ints __attribute__((vector_size(kSide * 4)));
typedef uint32_t Words __attribute__((vector_size(kSide * 4)));

// What is packed: weights[k][r], zero past the last column and in rows that are not there.
struct Group {
    Floats weights[kGroup];
    int n_cols;
};

// Where it goes: what belongs to kSide rows in one group of their tile. Only rows first..last are touched.
struct Place {
    uint8_t *data;
    uint16_t *scales, *offsets;
    int first, last;

    // Word i of each row's data, as it lies in the tile.
    void put(int i, const Words &words) const {
        uint8_t *at = data + i * 64;
        if (first == 0 && last == kSide) {
            std::memcpy(at, &words, sizeof words);
        } else {
            for (int r = first; r < last; r++) put(i, r, words[r]);
        }
    }
    void put(int i, int r, uint32_t word) const { std::memcpy(data + i * 64 + r * 4, &word, 4); }
};

static inline int groups_of(const astrai_matrix &m) { return (m.cols + kGroup - 1) / kGroup; }
static inline int group_bytes(int format) {  // of one tile
    return format == ASTRAI_FLOAT32 ? 2048 : format == ASTRAI_BFLOAT16 ? 1024 : format == ASTRAI_INT8 ? 512 : 256;
}
// Of rows row.. row + kSide of the matrix; `row` is a multiple of kSide.
static inline Place place_of(const astrai_matrix &m, int row, int group, int first, int last) {
    const size_t at = size_t(row / kTile) * size_t(groups_of(m)) + size_t(group), r = size_t(row % kTile);
    return {static_cast<uint8_t *>(m.data) + at * size_t(group_bytes(m.format)) + r * 4,
            m.scales ? m.scales + at * kTile + r : nullptr, m.offsets ? m.offsets + at * kTile + r : nullptr, first, last};
}

// Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even.
static inline Floats nearest(const Floats &x) { return (x + 12582912.0f) - 12582912.0f; }
// NaN becomes `most`.
static inline Floats between(float least, const Floats &x, float most) {
    const Floats low = Floats{} + least, high = Floats{} + most;
    const Floats below = x < high ? x : high;
    return below > low ? below : low;
}
static inline Words whole(const Floats &x) { return __builtin_convertvector(__builtin_convertvector(x, Ints), Words); }
static inline Floats inverse(const Floats &x) { return x == 0.0f ? Floats{} : 1.0f / x; }
static inline Floats chosen(const Ints &which, const Floats &a, const Floats &b) { return which ? a : b; }

constexpr uint16_t kNotANumber = 0x7e00;

// The largest magnitude of each row; rows that hold NaN or infinity are marked.
static inline Floats magnitude(const Group &group, Ints &broken) {
    Ints most{};
    for (int k = 0; k < kGroup; k++) {
        const Ints bits = bits_as<Ints>(group.weights[k]) & 0x7fffffff;
        most = most > bits ? most : bits;
    }
    broken = most >= 0x7f800000;
    return bits_as<Floats>(most);
}

// Rounds to float16 and stores; NaN for broken rows, so that the fault surfaces in whatever is computed from the group.
static inline Floats put_halves(const Place &place, uint16_t *at, const Floats &values, const Ints &broken) {
    Floats rounded{};
    for (int r = 0; r < kSide; r++) {
        const uint16_t half = broken[r] ? kNotANumber : float_to_half(values[r]);
        if (r >= place.first && r < place.last) at[r] = half;
        rounded[r] = broken[r] ? 0.0f : half_to_float(half);
    }
    return rounded;
}

static inline void put_float32(const Group &group, const Place &place) {
    for (int k = 0; k < kGroup; k++) place.put(k, bits_as<Words>(group.weights[k]));
}

// To nearest, ties to even; NaN stays NaN.
static inline Words bfloat16(const Floats &x) {
    const Words bits = bits_as<Words>(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 64) : rounded;
}
static inline void put_bfloat16(const Group &group, const Place &place) {
    for (int k = 0; k < kGroup; k += 2) {
        place.put(k / 2, bfloat16(group.weights[k]) | bfloat16(group.weights[k + 1]) << 16);
    }
}

// Largest magnitude / 127; codes are computed against the scale as float16 has it.
static inline void put_int8(const Group &group, const Place &place) {
    Ints broken;
    const Floats most = magnitude(group, broken);
    const Floats factor = inverse(put_halves(place, place.scales, most / 127.0f, broken));
    for (int k = 0; k < kGroup; k += 4) {
        Words word{};
        for (int j = 0; j < 4; j++) {
            word |= whole(between(-127, nearest(group.weights[k + j] * factor), 127) + 128.0f) << (8 * j);
        }
        place.put(k / 4, word);
    }
}

// Codes 0..15 of the weights, column k in the low nibbles and column k + 16 in the high ones.
static inline void put_nibbles(const Group &group, const Place &place, const Floats &factor, const Floats &middle) {
    auto code = [&](int k) {
        return whole(between(0, nearest((group.weights[k] - middle) * factor) + 8.0f, 15));
    };
    for (int k = 0; k < 16; k += 4) {
        Words word{};
        for (int j = 0; j < 4; j++) word |= (code(k + j) | code(k + j + 16) << 4) << (8 * j);
        place.put(k / 4, word);
    }
}

// weight = scale * (code - 8). The scale with the least squared error among those that put the largest weight at 5.5, 5.75,
// .. 9 steps from zero, on its side that has one code more or on the other; codes fixed, the best scale has a closed form.
static inline void put_int4(const Group &group, const Place &place) {
    Ints broken;
    const Floats most = magnitude(group, broken);
    Floats peak{};  // the weight that has it
    for (int k = 0; k < kGroup; k++) {
        const Floats w = group.weights[k];
        peak = chosen((w == most) | (-w == most), w, peak);
    }
    Floats gain{}, scale = peak / -8.0f;
    for (int side = -1; side <= 1; side += 2) {
        for (int step = 0; step < 15; step++) {
            const Floats factor = inverse(peak / (float(side) * (5.5f + 0.25f * float(step))));
            Floats products{}, squares{};
            for (int k = 0; k < group.n_cols; k++) {
                const Floats code = between(-8, nearest(group.weights[k] * factor), 7);
                products += code * group.weights[k], squares += code * code;
            }
            const Floats best = products * inverse(squares), gained = products * best;
            scale = chosen(gained > gain, best, scale);
            gain = gained > gain ? gained : gain;
        }
    }
    put_nibbles(group, place, inverse(put_halves(place, place.scales, scale, broken)), Floats{});
}

// weight = scale * (code - 8) + offset. Scale and offset by least squares for codes that spread the group's range over 12,
// 12.5, .. 17 steps; the one with the least squared error.
static inline void put_int4_with_offsets(const Group &group, const Place &place) {
    Ints broken;
    magnitude(group, broken);
    Floats low = group.weights[0], high = low, sum{};
    for (int k = 0; k < group.n_cols; k++) {
        const Floats w = group.weights[k];
        low = w < low ? w : low, high = w > high ? w : high, sum += w;
    }
    const float n = float(group.n_cols);
    const Floats middle = low + (high - low) * 0.5f;
    Floats gain{}, scale = (high - low) / 15.0f, offset = middle + scale * 0.5f;
    for (int step = 0; step < 11; step++) {
        const Floats factor = inverse((high - low) / (12.0f + 0.5f * float(step)));
        Floats codes{}, squares{}, products{};
        for (int k = 0; k < group.n_cols; k++) {
            const Floats code = between(-8, nearest((group.weights[k] - middle) * factor - 0.5f), 7);
            codes += code, squares += code * code, products += code * group.weights[k];
        }
        const Floats spread = n * squares - codes * codes, together = n * products - codes * sum;
        const Floats slope = together * inverse(spread), gained = together * slope;
        const Ints better = gained > gain;
        scale = chosen(better, slope, scale), offset = chosen(better, (sum - slope * codes) / n, offset);
        gain = chosen(better, gained, gain);
    }
    const Floats around = put_halves(place, place.offsets, offset, Ints{});
    put_nibbles(group, place, inverse(put_halves(place, place.scales, scale, broken)), around);
}

static inline void put_group(const astrai_matrix &m, const Group &group, const Place &place) {
    switch (m.format) {
        case ASTRAI_FLOAT32: return put_float32(group, place);
        case ASTRAI_BFLOAT16: return put_bfloat16(group, place);
        case ASTRAI_INT8: return put_int8(group, place);
        default: return m.offsets ? put_int4_with_offsets(group, place) : put_int4(group, place);
    }
}

// One row's group whose codes fit as they are: no rounding but that of a scale or an offset to float16.
using CopyGroup = void (*)(const uint8_t *row, int group, const Place &, int r);

static inline void copy_q8_0(const uint8_t *row, int group, const Place &place, int r) {
    const uint8_t *block = row + size_t(group) * 34;
    place.scales[r] = read<uint16_t>(block);
    for (int i = 0; i < 8; i++) place.put(i, r, read<uint32_t>(block + 2 + i * 4) ^ 0x80808080);
}
static inline void copy_q4_0(const uint8_t *row, int group, const Place &place, int r) {
    const uint8_t *block = row + size_t(group) * 18;
    place.scales[r] = read<uint16_t>(block);
    if (place.offsets) place.offsets[r] = 0;
    for (int i = 0; i < 4; i++) place.put(i, r, read<uint32_t>(block + 2 + i * 4));
}
static inline void copy_q4_1(const uint8_t *row, int group, const Place &place, int r) {
    const uint8_t *block = row + size_t(group) * 20;
    place.scales[r] = read<uint16_t>(block);
    place.offsets[r] = float_to_half(half_at(block + 2) + 8.0f * half_at(block));
    for (int i = 0; i < 4; i++) place.put(i, r, read<uint32_t>(block + 4 + i * 4));
}
static inline void copy_q4_k(const uint8_t *row, int group, const Place &place, int r) {
    const uint8_t *block = row + size_t(group / 8) * 144;
    const KGroup of = k_group(block, group % 8);
    const uint16_t scale = float_to_half(of.scale);
    place.scales[r] = scale;
    place.offsets[r] = float_to_half(8.0f * of.scale - of.least);
    const uint8_t *codes = block + 16 + group % 8 / 2 * 32;
    const int shift = group % 2 * 4;
    for (int i = 0; i < 4; i++) {
        const uint32_t low = read<uint32_t>(codes + i * 4) >> shift & 0x0f0f0f0f;
        const uint32_t high = read<uint32_t>(codes + i * 4 + 16) >> shift & 0x0f0f0f0f;
        place.put(i, r, low | high << 4);
    }
}

static inline CopyGroup copier(const astrai_matrix &m, int from) {
    if (m.format == ASTRAI_INT8 && from == ASTRAI_FROM_Q8_0) return copy_q8_0;
    if (m.format == ASTRAI_INT4 && from == ASTRAI_FROM_Q4_0) return copy_q4_0;
    if (m.format == ASTRAI_INT4 && from == ASTRAI_FROM_Q4_1 && m.offsets) return copy_q4_1;
    if (m.format == ASTRAI_INT4 && from == ASTRAI_FROM_Q4_K && m.offsets) return copy_q4_k;
    return nullptr;
}

// Rows row + first.. row + last, the first of them at `rows`.
static inline void pack_some(const astrai_matrix &m, int from, const uint8_t *rows, int64_t row_bytes, int row, int first,
                             int last) {
    const LoadGroup load = loader(from);
    const CopyGroup copy = copier(m, from);
    for (int g = 0; g < groups_of(m); g++) {
        const Place place = place_of(m, row, g, first, last);
        if (copy) {
            for (int r = first; r < last; r++) copy(rows + (r - first) * row_bytes, g, place, r);
            continue;
        }
        Group group;
        group.n_cols = m.cols - g * kGroup < kGroup ? m.cols - g * kGroup : kGroup;
        if (group.n_cols < kGroup || first > 0 || last < kSide) std::memset(group.weights, 0, sizeof group.weights);
        for (int r = first; r < last; r++) {
            float line[kGroup];
            load(rows + (r - first) * row_bytes, g, group.n_cols, line);
            for (int k = 0; k < group.n_cols; k++) group.weights[k][r] = line[k];
        }
        put_group(m, group, place);
    }
}

// Throws std::invalid_argument where `pack_rows` would read what is not there.
static inline void check_source(const astrai_matrix &matrix, int from, int64_t row_bytes) {
    const int64_t needed = source_row_bytes(from, matrix.cols);
    if (needed == 0) throw std::invalid_argument("rows of this length cannot be stored in the source's format");
    if (row_bytes < needed) throw std::invalid_argument("the source's rows are shorter than the matrix's");
}

// Packs n_rows rows of `source`, `row_bytes` apart, as rows first_row.. of a matrix whose memory is zeroed. Threads may pack
// different rows of one matrix at once. The source has been checked.
static inline void pack_rows(const astrai_matrix &matrix, int from, const void *source, int64_t row_bytes, int first_row,
                             int n_rows) {
    const auto *rows = static_cast<const uint8_t *>(source);
    for (int row = first_row; row < first_row + n_rows;) {
        const int first = row % kSide, left = first + first_row + n_rows - row, last = left < kSide ? left : kSide;
        pack_some(matrix, from, rows + (row - first_row) * row_bytes, row_bytes, row - first, first, last);
        row += last - first;
    }
}

// One row as float32 [cols].
static inline void unpack_row(const astrai_matrix &matrix, int row, float *out) {
    const int r = row % kSide;
    for (int g = 0; g < groups_of(matrix); g++, out += kGroup) {
        const Place place = place_of(matrix, row - r, g, r, r + 1);
        const int n = matrix.cols - g * kGroup < kGroup ? matrix.cols - g * kGroup : kGroup;
        auto byte = [&](int k) { return place.data[k / 4 * 64 + r * 4 + k % 4]; };
        if (matrix.format == ASTRAI_FLOAT32) {
            for (int k = 0; k < n; k++) out[k] = read<float>(place.data + k * 64 + r * 4);
        } else if (matrix.format == ASTRAI_BFLOAT16) {
            for (int k = 0; k < n; k++) {
                out[k] = bfloat16_to_float(read<uint16_t>(place.data + k / 2 * 64 + r * 4 + k % 2 * 2));
            }
        } else {
            const float scale = half_to_float(place.scales[r]);
            const float offset = place.offsets ? half_to_float(place.offsets[r]) : 0.0f;
            const bool nibbles = matrix.format == ASTRAI_INT4;
            for (int k = 0; k < n; k++) {
                const int code = nibbles ? (byte(k % 16) >> (k < 16 ? 0 : 4) & 15) - 8 : byte(k) - 128;
                out[k] = scale * float(code) + offset;
            }
        }
    }
}

}  // namespace ASTRAI_HERE::packing

namespace ASTRAI_HERE {
using packing::check_source;
using packing::pack_rows;
using packing::unpack_row;
}  // namespace ASTRAI_HERE

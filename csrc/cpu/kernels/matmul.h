// y = W x for packed matrices (see astrai_matrix): tiles of 16 output rows against a few rows of activations.
//
// An output element is one chain of operations over the columns, whatever shares the registers with it: how many tiles and
// rows a pass takes changes the speed, never a bit. What is quantised is summed in integers inside a group of 32 columns.
#pragma once

#include <algorithm>

namespace astrai::ASTRAI_ISA {

enum class Code { kBytes, kNibbles, kSpreadNibbles };  // spread: nibbles that were unpacked to a byte each

// A run of tiles of one matrix.
struct Tiles {
    const uint8_t *data;
    const uint16_t *scales, *offsets;
    size_t stride;  // bytes of data from one tile to the next
};

struct Output {
    float *y;  // of the first row and tile
    size_t stride;
    const float *bias;  // of the first tile, or nullptr
};

template <int M, int N> inline void write(const F32 (&sums)[N][M], const Output &out) {
    for (int t = 0; t < N; t++) {
        for (int m = 0; m < M; m++) {
            F32 v = out.bias ? add(sums[t][m], load(out.bias + t * kLanes)) : sums[t][m];
            store(out.y + m * out.stride + t * kLanes, v);
        }
    }
}

// M rows from `first` on against N tiles. While it computes it fetches `lines` cache lines a group from `next` on.
template <int M, int N, Code C, bool kOffsets>
inline void quantised_pass(const Tiles &w, const Rows &x, int first, const Output &out, const uint8_t *next, int lines) {
    constexpr int kLoads = C == Code::kNibbles ? 4 : 8;
    constexpr size_t kBytesOfGroup = kLoads * 64;
    const int groups = x.groups();
    const int8_t *codes = x.codes + size_t(first) * x.cols;
    const size_t at = size_t(first) * groups;
    F32 sums[N][M];
    for (int t = 0; t < N; t++)
        for (int m = 0; m < M; m++) sums[t][m] = zero();
    for (int g = 0; g < groups; g++) {
        for (int line = 0; line < lines; line++) prefetch(next + (size_t(g) * lines + line) * 64);
        I32 dots[N][M];
        for (int m = 0; m < M; m++) {
            I32 start = set1_int(x.starts[at + size_t(m) * groups + g]);
            for (int t = 0; t < N; t++) dots[t][m] = start;
        }
        const uint8_t *group = w.data + g * kBytesOfGroup;
        auto four = [&](int m, int j) {
            int32_t bytes;
            std::memcpy(&bytes, codes + size_t(m) * x.cols + g * kGroup + j * 4, 4);
            return bytes;
        };
#pragma GCC unroll 8
        for (int j = 0; j < kLoads; j++) {
            Bytes low[N], high[N];
            for (int t = 0; t < N; t++) {
                low[t] = load_bytes(group + t * w.stride + j * 64);
                if (C == Code::kNibbles) high[t] = high_nibbles(low[t]), low[t] = low_nibbles(low[t]);
            }
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                int32_t a = four(m, j);
                for (int t = 0; t < N; t++) {
                    dots[t][m] = C == Code::kBytes ? dot_bytes(dots[t][m], low[t], a) : dot_nibbles(dots[t][m], low[t], a);
                }
                if (C == Code::kNibbles) {
                    int32_t b = four(m, j + 4);
                    for (int t = 0; t < N; t++) dots[t][m] = dot_nibbles(dots[t][m], high[t], b);
                }
            }
        }
        for (int t = 0; t < N; t++) {
            const size_t scale_at = (size_t(t) * groups + g) * kLanes;
            F32 scale = load_float16(w.scales + scale_at);
            F32 offset = kOffsets ? load_float16(w.offsets + scale_at) : zero();
            for (int m = 0; m < M; m++) {
                const size_t i = at + size_t(m) * groups + g;
                sums[t][m] = fma(to_float(dots[t][m]), mul(scale, set1(x.scales[i])), sums[t][m]);
                if (kOffsets) sums[t][m] = fma(offset, set1(x.sums[i]), sums[t][m]);
            }
        }
    }
    write<M, N>(sums, out);
}

// How float weights are stored, and what a tile's columns do to a sum.
struct BFloat16Weights {
    static constexpr int kColumns = 2;  // that one load holds of each row
    static constexpr size_t kBytes = 2;
    static const uint16_t *activations(const Rows &x) { return x.halves; }
    static Pairs load(const uint8_t *p) { return load_pairs(reinterpret_cast<const uint16_t *>(p)); }
    static F32 dot(F32 sum, Pairs weights, const uint16_t *activations) {
        uint32_t two;
        std::memcpy(&two, activations, 4);
        return dot_pairs(sum, weights, two);
    }
};
struct Float32Weights {
    static constexpr int kColumns = 1;
    static constexpr size_t kBytes = 4;
    static const float *activations(const Rows &x) { return x.floats; }
    static F32 load(const uint8_t *p) { return ASTRAI_ISA::load(reinterpret_cast<const float *>(p)); }
    static F32 dot(F32 sum, F32 weights, const float *activations) { return fma(weights, set1(*activations), sum); }
};

template <class Weights, int M, int N> inline void float_pass(const Tiles &w, const Rows &x, int first, const Output &out) {
    const auto *row = Weights::activations(x) + size_t(first) * x.cols;
    F32 sums[N][M];
    for (int t = 0; t < N; t++)
        for (int m = 0; m < M; m++) sums[t][m] = zero();
#pragma GCC unroll 4
    for (int k = 0; k < x.cols; k += Weights::kColumns) {
        decltype(Weights::load(w.data)) columns[N];
        for (int t = 0; t < N; t++) columns[t] = Weights::load(w.data + t * w.stride + size_t(k) * kLanes * Weights::kBytes);
        for (int m = 0; m < M; m++) {
            for (int t = 0; t < N; t++) sums[t][m] = Weights::dot(sums[t][m], columns[t], row + size_t(m) * x.cols + k);
        }
    }
    write<M, N>(sums, out);
}

// From M and N at run time to a pass with both at compile time: M rows at most kMost.
template <int N, int kMost, template <int, int> class Pass> struct Dispatch {
    template <int M = kMost, class... Arguments> static void call(int m, const Arguments &...arguments) {
        if constexpr (M > 1) {
            if (m < M) return call<M - 1>(m, arguments...);
        }
        Pass<M, N>::run(arguments...);
    }
};

template <Code C, bool kOffsets> struct Quantised {
    template <int M, int N> struct Pass {
        static void run(const Tiles &w, const Rows &x, int first, const Output &out, const uint8_t *next, int lines) {
            quantised_pass<M, N, C, kOffsets>(w, x, first, out, next, lines);
        }
    };
};
template <class Weights> struct Plain {
    template <int M, int N> struct Pass {
        static void run(const Tiles &w, const Rows &x, int first, const Output &out) { float_pass<Weights, M, N>(w, x, first, out); }
    };
};

constexpr size_t kAhead = 2048;  // bytes
constexpr int kManyRows = 24;  // from here on tiles stay in the cache while all rows pass, and nibbles are unpacked once

// How many rows a pass takes: as even as registers allow; 13 to 16 go best by fours.
inline int rows_of_a_pass(int rows, int most) {
    if (most == 6 && rows > 12 && rows <= 16) most = 4;
    int passes = (rows + most - 1) / most;
    return (rows + passes - 1) / passes;
}

// One matrix, ready to be multiplied in runs of tiles. `spread`: memory for two unpacked tiles (see spread_bytes).
class Matmul {
  public:
    Matmul(const astrai_matrix &matrix, const Rows &x, int n_rows, const float *bias, float *y, size_t y_stride)
        : matrix_(matrix), x_(x), n_rows_(n_rows), bias_(bias), y_(y), y_stride_(y_stride) {}

    static int tiles(const astrai_matrix &matrix) { return padded(matrix.rows, kLanes) / kLanes; }
    static size_t spread_bytes(int cols) { return size_t(2) * padded(cols, kGroup) * kLanes; }

    // Tiles first..last-1 of the matrix, all rows.
    void run(int first, int last, uint8_t *spread) const {
        switch (matrix_.format) {
            case ASTRAI_INT8: return quantised<Code::kBytes, false>(first, last, spread);
            case ASTRAI_INT4:
                if (matrix_.offsets) return quantised<Code::kNibbles, true>(first, last, spread);
                return quantised<Code::kNibbles, false>(first, last, spread);
            case ASTRAI_BFLOAT16: return plain<BFloat16Weights>(first, last);
            default: return plain<Float32Weights>(first, last);
        }
    }

  private:
    Output output(int row, int tile) const {
        return {y_ + row * y_stride_ + size_t(tile) * kLanes, y_stride_, bias_ ? bias_ + size_t(tile) * kLanes : nullptr};
    }

    template <Code C, bool kOffsets> void quantised(int first, int last, uint8_t *spread) const {
        const int groups = x_.groups();
        const size_t group_bytes = C == Code::kNibbles ? 256 : 512;
        auto tiles_at = [&](int tile) {
            const size_t scale_at = size_t(tile) * groups * kLanes;
            return Tiles{static_cast<const uint8_t *>(matrix_.data) + size_t(tile) * groups * group_bytes,
                         matrix_.scales + scale_at, kOffsets ? matrix_.offsets + scale_at : nullptr, groups * group_bytes};
        };
        constexpr bool pairs = kRowsOfTwoTiles > 1;
        const bool many = n_rows_ >= kManyRows;
        // Two tiles share the loads of activations; nibbles gain from it early, bytes only where registers are short.
        const bool wide = pairs && n_rows_ > (C == Code::kBytes ? 8 : 4);
        const int most = rows_of_a_pass(n_rows_, wide ? kRowsOfTwoTiles : kRowsOfOneTile);
        for (int tile = first; tile < last;) {
            const int n = wide ? std::min(2, last - tile) : 1;
            Tiles w = tiles_at(tile);
            const uint8_t *next = w.data + n * w.stride;
            if (C == Code::kNibbles && many) {
                spread_tiles(w, n, groups, spread);
                w.data = spread, w.stride = size_t(groups) * 512;
                passes<Code::kSpreadNibbles, kOffsets>(w, n, tile, most, next, 0);
            } else {
                // Between the passes the next tiles come in: each pass fetches its share. A single pass over a few rows fetches
                // what it meets soon; over one row it is as fast as the memory by itself.
                const int n_passes = (n_rows_ + most - 1) / most;
                const int in_group = int(group_bytes) / 64 * n;
                if (n_passes == 1) next = w.data + kAhead;
                passes<C, kOffsets>(w, n, tile, most, next, n_rows_ > 1 && !many ? (in_group + n_passes - 1) / n_passes : 0);
            }
            tile += n;
        }
    }

    template <Code C, bool kOffsets>
    void passes(const Tiles &w, int n, int tile, int most, const uint8_t *next, int lines) const {
        for (int row = 0; row < n_rows_; row += most) {
            const int m = std::min(most, n_rows_ - row);
            using Kind = Quantised<C, kOffsets>;
            if constexpr (kRowsOfTwoTiles > 1) {
                if (n == 2) {
                    Dispatch<2, kRowsOfTwoTiles, Kind::template Pass>::call(m, w, x_, row, output(row, tile), next, lines);
                    next += size_t(x_.groups()) * lines * 64;
                    continue;
                }
            }
            constexpr int kMost = kRowsOfOneTile > kRowsOfTwoTiles ? kRowsOfOneTile : kRowsOfTwoTiles;
            Dispatch<1, kMost, Kind::template Pass>::call(m, w, x_, row, output(row, tile), next, lines);
            next += size_t(x_.groups()) * lines * 64;
        }
    }

    static void spread_tiles(const Tiles &w, int n, int groups, uint8_t *spread) {
        for (int t = 0; t < n; t++) {
            for (int g = 0; g < groups; g++) {
                const uint8_t *from = w.data + t * w.stride + g * 256;
                uint8_t *to = spread + (size_t(t) * groups + g) * 512;
                for (int j = 0; j < 4; j++) {
                    Bytes both = load_bytes(from + j * 64);
                    store_bytes(to + j * 64, low_nibbles(both)), store_bytes(to + (j + 4) * 64, high_nibbles(both));
                }
            }
        }
    }

    template <class Weights> void plain(int first, int last) const {
        const size_t tile_bytes = size_t(x_.cols) * kLanes * Weights::kBytes;
        const bool wide = kRowsOfTwoTiles > 1;
        const int most = wide ? rows_of_a_pass(n_rows_, kRowsOfTwoTiles) : rows_of_a_pass(n_rows_, kRowsOfOneTile);
        for (int tile = first; tile < last;) {
            const int left = last - tile;
            // One row keeps enough sums in flight only over several tiles; many rows share the loads of two.
            const int n = most <= 2 && left >= kFloatTiles ? kFloatTiles : wide && left >= 2 ? 2 : 1;
            Tiles w{static_cast<const uint8_t *>(matrix_.data) + tile * tile_bytes, nullptr, nullptr, tile_bytes};
            for (int row = 0; row < n_rows_; row += most) {
                const int m = std::min(most, n_rows_ - row);
                if (n == kFloatTiles) {
                    Dispatch<kFloatTiles, 2, Plain<Weights>::template Pass>::call(m, w, x_, row, output(row, tile));
                } else if (n == 2) {
                    Dispatch<2, kRowsOfTwoTiles, Plain<Weights>::template Pass>::call(m, w, x_, row, output(row, tile));
                } else {
                    constexpr int kMost = kRowsOfOneTile > kRowsOfTwoTiles ? kRowsOfOneTile : kRowsOfTwoTiles;
                    Dispatch<1, kMost, Plain<Weights>::template Pass>::call(m, w, x_, row, output(row, tile));
                }
            }
            tile += n;
        }
    }

    const astrai_matrix &matrix_;
    const Rows x_;
    const int n_rows_;
    const float *bias_;
    float *y_;
    const size_t y_stride_;
};

}  // namespace astrai::ASTRAI_ISA

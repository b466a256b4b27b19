// Rows of queries against one stretch of keys and values: scores, softmax, weighted values, and merging with the stretches
// before.
#pragma once

#include <algorithm>

#include "kv.h"

namespace astrai::ASTRAI_ISA {

constexpr float kNothing = -1e30f;  // the maximum over no scores; finite, so that differences are numbers

// 2^x for x <= 0 within 2.1 units in the last place; 2^-126 below that; exactly 1 at 0. NaN stays NaN.
inline F32 exp2(F32 x) {
    x = max(set1(-126.0f), x);  // the second argument when it is NaN
    F32 n = round(x), r = sub(x, n), p = set1(0.001326472542f);
    for (float c : {0.009671512768f, 0.05550733749f, 0.2402224208f, 0.6931469776f, 1.0f}) p = fma(p, r, set1(c));
    return times_power_of_two(p, n);
}

template <class Kv> constexpr int kQueryWords = kMaxHeadDim / Kv::kNumbers;  // from row to row
template <class Kv> constexpr int kWeightWords = kStretch / Kv::kNumbers;

// Rows are taken a few at a time, in groups of nearly the same size.
struct Groups {
    int rows, n;
    explicit Groups(int n_rows) : rows(n_rows), n((n_rows + kAttentionRows - 1) / kAttentionRows) {}
    int first(int g) const { return rows * g / n; }
    int size(int g) const { return first(g + 1) - first(g); }
};

// What is known of some rows over a part of their context. Groups of rows are 16 apart in `most` and `total`.
struct Softmax {
    float *most;    // largest score
    float *total;   // sum of 2^(score - most)
    float *values;  // [rows, head_dim]: values weighted so

    Softmax(float *memory, int rows)
        : most(memory), total(memory + Groups(rows).n * kLanes), values(memory + Groups(rows).n * 2 * kLanes) {}
    static int64_t floats(int rows, int head_dim) { return int64_t(Groups(rows).n) * 2 * kLanes + int64_t(rows) * head_dim; }

    void clear(int rows, int head_dim) {
        for (int g = 0; g < Groups(rows).n; g++) {
            store(most + g * kLanes, set1(kNothing));
            store(total + g * kLanes, zero());
        }
        std::fill(values, values + size_t(rows) * head_dim, 0.0f);
    }
};

// Takes a group's maxima and sums over the next stretch into those so far. What the values so far and the new ones are to be
// multiplied by comes back.
inline void merge_sums(float *most, float *total, const float *new_most, const float *new_total, float *old_factor,
                       float *new_factor) {
    F32 a = load(most), b = load(new_most), both = max(a, b);
    F32 of_old = exp2(sub(a, both)), of_new = exp2(sub(b, both));
    store(total, fma(load(total), of_old, mul(load(new_total), of_new)));
    store(most, both);
    store(old_factor, of_old), store(new_factor, of_new);
}
inline F32 merge_values(F32 so_far, float old_factor, F32 more, float new_factor) {
    return fma(so_far, set1(old_factor), mul(more, set1(new_factor)));
}

// Scores of R rows against P blocks: [R, kStretch]. Fetches `later` meanwhile.
template <class Kv, int R, int P>
inline void score_blocks(const uint8_t *const *blocks, const uint8_t *const *later, const uint32_t *queries, int words,
                         float *scores) {
    const uint8_t *k[P], *next[P];
    for (int p = 0; p < P; p++) k[p] = blocks[p], next[p] = later[p];
    F32 sums[R][P];
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) sums[r][p] = zero();
#pragma GCC unroll 2
    for (int w = 0; w < words; w++) {
        typename Kv::Lanes keys[P];
        for (int p = 0; p < P; p++) {
            keys[p] = Kv::lanes(k[p] + w * 64);
            prefetch(next[p] + w * 64);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) sums[r][p] = Kv::dot(sums[r][p], keys[p], queries[r * kQueryWords<Kv> + w]);
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) store(scores + r * kStretch + p * kLanes, sums[r][p]);
}

template <class Kv, int R, int P>
inline void score(const Stretch &at, const Stretch &later, int first, int last, const uint32_t *queries, int words,
                  float *scores) {
    for (; first + P <= last; first += P)
        score_blocks<Kv, R, P>(at.k + first, later.k + first, queries, words, scores + first * kLanes);
    if constexpr (P > 1) {
        if (first < last) score<Kv, R, P / 2>(at, later, first, last, queries, words, scores);
    }
}

// The values of stretch positions first..last of one group of rows, and where their weighted sums go.
struct Weighing {
    const Stretch *at, *later;
    int first, last;
    const uint32_t *weights;  // [rows, kWeightWords]
    size_t line;              // bytes of values that meet one word
    float *values;            // [rows, head_dim]
    int head_dim;
    const float *old_factor, *new_factor;  // or nullptr: the sums go into `values` as they are
};

// N * 16 features of R rows, from feature `feature` on.
template <class Kv, int R, int N> inline void weigh(const Weighing &w, int feature) {
    constexpr int kWords = kBlockSlots / Kv::kNumbers;
    const size_t offset = size_t(feature) * 4;
    F32 sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r][n] = zero();
    auto word = [&](const uint8_t *v, const uint32_t *weights, bool first, bool second) {
        typename Kv::Lanes lanes[N];
        for (int n = 0; n < N; n++) {
            lanes[n] = Kv::lanes(v + n * 64);
            if (!first || !second) lanes[n] = Kv::only(lanes[n], first, second);
        }
        for (int r = 0; r < R; r++) {
            const uint32_t weight = weights[r * kWeightWords<Kv>];
            for (int n = 0; n < N; n++) sums[r][n] = Kv::dot(sums[r][n], lanes[n], weight);
        }
    };
    for (int block = w.first / kBlockSlots; block * kBlockSlots < w.last; block++) {
        const int from = std::max(w.first - block * kBlockSlots, 0), to = std::min(w.last - block * kBlockSlots, kBlockSlots);
        // Of the later block as many lines, but those that lie side by side: strides cost bandwidth.
        const uint8_t *v = w.at->v[block] + offset, *next = w.later->v[block] + offset * kWords;
        const uint32_t *weights = w.weights + block * kWords;
        int i = from / Kv::kNumbers;
        if (from % Kv::kNumbers) word(v + i * w.line, weights + i, false, true), i++;
        for (; (i + 1) * Kv::kNumbers <= to; i++) {
            for (int n = 0; n < N; n++) prefetch(next + (i * N + n) * 64);
            word(v + i * w.line, weights + i, true, true);
        }
        if (i * Kv::kNumbers < to) word(v + i * w.line, weights + i, true, false);
    }
    for (int r = 0; r < R; r++) {
        float *out = w.values + size_t(r) * w.head_dim + feature;
        for (int n = 0; n < N; n++) {
            F32 sum = sums[r][n];
            if (w.old_factor) sum = merge_values(load(out + n * kLanes), w.old_factor[r], sum, w.new_factor[r]);
            store(out + n * kLanes, sum);
        }
    }
}

template <class Kv, int R, int N> inline void weigh_features(const Weighing &w, int feature, int n) {
    if (n == N) return weigh<Kv, R, N>(w, feature);
    if constexpr (N > 1) weigh_features<Kv, R, N - 1>(w, feature, n);
}

// What each row of a group sees of a stretch: positions first..last, counted from the stretch's begin.
struct Sight {
    int first[kAttentionRows], last[kAttentionRows];
};

// R rows and one stretch of which the rows together see first..last. The result is merged into `most`, `total` and `values` or,
// where they are to hold this stretch alone, written there.
template <class Kv, int R>
inline void attend_rows(const AttentionLayer &layer, const Stretch &at, const Stretch &later, const Sight &sight, int first,
                        int last, const uint32_t *queries, float *most, float *total, float *values, bool merge) {
    constexpr int kSums = std::min(kAttentionSums, 16) / R, P = kSums >= 8 ? 8 : kSums >= 4 ? 4 : kSums >= 2 ? 2 : 1;
    constexpr int N = std::max(1, std::min(kAttentionSums / R, R == 1 ? 8 : 4));
    alignas(64) float scores[R * kStretch];
    alignas(64) uint32_t weights[R * kWeightWords<Kv>];
    alignas(64) float here_most[kLanes], here_total[kLanes], old_factor[kLanes] = {}, new_factor[kLanes] = {};
    const int begin = first / kBlockSlots, end = (last + kBlockSlots - 1) / kBlockSlots;
    score<Kv, R, P>(at, later, begin, end, queries, layer.head_dim / Kv::kNumbers, scores);

    store(here_most, set1(kNothing)), store(here_total, zero());
    for (int r = 0; r < R; r++) {
        float *row = scores + r * kStretch;
        auto from = [&](int block) { return std::min(std::max(sight.first[r] - block * kLanes, 0), kLanes); };
        auto to = [&](int block) { return std::min(std::max(sight.last[r] - block * kLanes, 0), kLanes); };
        auto seen = [&](F32 x, int block, float other) {
            const int a = from(block), b = to(block);
            return a == 0 && b == kLanes ? x : keep_from(keep_first(x, b, set1(other)), a, set1(other));
        };
        F32 high = set1(kNothing);
        for (int block = begin; block < end; block++) high = max(high, seen(load(row + block * kLanes), block, kNothing));
        here_most[r] = largest(high);
        F32 peak = set1(here_most[r]), sum_of_row = zero();
        for (int block = begin; block < end; block++) {
            F32 weight = seen(exp2(sub(load(row + block * kLanes), peak)), block, 0.0f);
            sum_of_row = add(sum_of_row, weight);
            Kv::words(weights + r * kWeightWords<Kv> + block * kLanes / Kv::kNumbers, weight);
        }
        here_total[r] = sum(sum_of_row);
    }
    if (merge) {
        merge_sums(most, total, here_most, here_total, old_factor, new_factor);
    } else {
        store(most, load(here_most)), store(total, load(here_total));
    }

    const Weighing w{&at,    &later,         first, last, weights, size_t(layer.head_dim) * 4, values, layer.head_dim,
                     merge ? old_factor : nullptr, new_factor};
    const int n = layer.head_dim / kLanes, parts = (n + N - 1) / N;
    for (int part = 0; part < parts; part++) {
        const int from = n * part / parts, to = n * (part + 1) / parts;
        weigh_features<Kv, R, N>(w, from * kLanes, to - from);
    }
}

template <class Kv, int R, class... Rest> inline void attend_group(int rows, const Rest &...rest) {
    if (rows == R) return attend_rows<Kv, R>(rest...);
    if constexpr (R > 1) attend_group<Kv, R - 1>(rows, rest...);
}

}  // namespace astrai::ASTRAI_ISA

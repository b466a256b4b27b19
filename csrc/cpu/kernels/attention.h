// Attention over the paged KV pool (see astrai_kv), the same code for prompt and decoding tokens.
//
// A row is one query head of one token. Its context is cut into stretches of 128 positions at multiples of 128; each gives a
// maximum, a sum of exponentials and weighted values of its own, and these are merged in ascending order by one formula. So a
// row's result depends on its query, its context and its window only: not on the rows beside it, on how the stretches were
// spread over threads, nor on where the slots lie. What a row does not see gets weight 0, and what none of the rows at hand
// sees is not multiplied at all, because stale slots may hold NaN.
#pragma once

#include <algorithm>

#include "../pool.h"
#include "attention_work.h"

namespace astrai::ASTRAI_ISA {

// Floats that one worker needs, whatever the context. Throws std::invalid_argument for shapes that the kernel does not have.
inline int64_t attention_scratch_floats(int n_heads, int n_kv_heads, int head_dim) {
    check_attention(n_heads, n_kv_heads, head_dim);
    const int rows = std::max(kTileRows, n_heads / n_kv_heads);
    return int64_t(rows) * kMaxHeadDim + Softmax::floats(rows, head_dim) + int64_t(2) * kStretch * head_dim;
}

// One item of the work: its rows against the stretches of its part of the context.
template <class Kv> class Attending {
  public:
    Attending(const AttentionLayer &layer, const astrai_step &step, const AttentionWork &work, float *scratch)
        : layer_(layer), step_(step), work_(work), rows_(std::max(kTileRows, layer.group())),
          queries_(reinterpret_cast<uint32_t *>(scratch)), state_(scratch + size_t(rows_) * kMaxHeadDim),
          copies_(reinterpret_cast<uint8_t *>(state_ + Softmax::floats(rows_, layer.head_dim))) {}

    void run(int index, const float *q, int64_t q_stride, float *out, int64_t out_stride) const {
        const AttentionWork::Item &item = work_.item(index);
        const AttentionWork::Unit &unit = work_.unit(item);
        const int group = layer_.group(), rows = (unit.last - unit.first) * group, dim = layer_.head_dim;
        const int64_t record = Softmax::floats(rows, dim);
        const Range range = stretches_of(unit, item.split), all = stretches_of(unit, -1);
        const bool whole = unit.splits == 1;

        const F32 scale = set1(layer_.scale * 1.44269504089f);  // weights are powers of two
        for (int row = 0; row < rows; row++) {
            const float *from = q + (unit.first + row / group) * q_stride + int64_t(unit.kv_head * group + row % group) * dim;
            uint32_t *to = queries_ + row * kQueryWords<Kv>;
            for (int d = 0; d < dim; d += kLanes) Kv::words(to + d / Kv::kNumbers, mul(load(from + d), scale));
        }
        Softmax state(state_, rows);
        if (whole) state.clear(rows, dim);
        const Context context(layer_, step_, unit.sequence, unit.kv_head);
        Stretch found{};
        if (range.first < range.last) found = find(context, unit, range.first);
        for (int stretch = range.first; stretch < range.last; stretch++) {
            Stretch later = stretch + 1 < range.last ? find(context, unit, stretch + 1) : begin_of(index + work_.threads());
            Stretch at = found;
            const Range seen = sight(unit, stretch);
            context.template gather<Kv>(at, stretch, seen.first, seen.last, copies_);
            Softmax here = whole ? state : Softmax(work_.records(unit) + (stretch - all.first) * record, rows);
            attend_stretch(unit, stretch, at, later, here, whole);
            found = later;
        }
        if (!whole) {
            if (!work_.finished(item)) return;
            state.clear(rows, dim);
            for (int stretch = all.first; stretch < all.last; stretch++)
                merge(state, Softmax(work_.records(unit) + (stretch - all.first) * record, rows), rows);
        }
        const Groups groups(rows);
        for (int g = 0; g < groups.n; g++) {
            for (int i = 0; i < groups.size(g); i++) {
                const int row = groups.first(g) + i;
                const F32 factor = div(set1(1.0f), set1(state.total[g * kLanes + i]));
                float *to = out + (unit.first + row / group) * out_stride + int64_t(unit.kv_head * group + row % group) * dim;
                for (int d = 0; d < dim; d += kLanes)  // + 0: no negative zero, which depends on the zeros that were added
                    store(to + d, add(mul(load(state.values + size_t(row) * dim + d), factor), zero()));
            }
        }
    }

  private:
    struct Range {
        int first, last;
    };

    int begin(int position) const { return layer_.window > 0 ? std::max(0, position - layer_.window + 1) : 0; }

    // Stretches that one part of a unit's context consists of; all of them for part -1.
    Range stretches_of(const AttentionWork::Unit &unit, int split) const {
        const int first = begin(step_.positions[unit.first]) / kStretch, last = step_.positions[unit.last - 1] / kStretch + 1;
        if (split < 0) return {first, last};
        const int64_t n = last - first;
        return {first + int(n * split / unit.splits), first + int(n * (split + 1) / unit.splits)};
    }

    // What any row of tokens first..last sees of a stretch, counted from its begin; empty ranges are 0, 0.
    Range sight(int first_token, int last_token, int stretch) const {
        const int base = stretch * kStretch;
        const int first = std::max(begin(step_.positions[first_token]) - base, 0);
        const int last = std::min(step_.positions[last_token - 1] + 1 - base, kStretch);
        return first < last ? Range{first, last} : Range{0, 0};
    }
    Range sight(const AttentionWork::Unit &unit, int stretch) const { return sight(unit.first, unit.last, stretch); }

    Stretch find(const Context &context, const AttentionWork::Unit &unit, int stretch) const {
        const Range seen = sight(unit, stretch);
        return context.find(stretch, seen.first, seen.last);
    }

    // The first blocks of an item that this thread will claim soon, if the others are as fast.
    Stretch begin_of(int index) const {
        if (index >= work_.items()) return {};
        const AttentionWork::Unit &unit = work_.unit(work_.item(index));
        const Range range = stretches_of(unit, work_.item(index).split);
        if (range.first == range.last) return {};
        return find(Context(layer_, step_, unit.sequence, unit.kv_head), unit, range.first);
    }

    void attend_stretch(const AttentionWork::Unit &unit, int stretch, const Stretch &at, const Stretch &next, const Softmax &to,
                        bool whole) const {
        const int group = layer_.group(), dim = layer_.head_dim;
        const Groups groups((unit.last - unit.first) * group);
        Stretch later = next;
        for (int block = 0; block < kBlocks; block++) {
            if (!later.k[block]) later.k[block] = at.k[block], later.v[block] = at.v[block];
        }
        for (int g = 0; g < groups.n; g++) {
            const int first_row = groups.first(g), n = groups.size(g), first_token = unit.first + first_row / group;
            const Range seen = sight(first_token, unit.first + (first_row + n - 1) / group + 1, stretch);
            float *most = to.most + g * kLanes, *total = to.total + g * kLanes, *values = to.values + size_t(first_row) * dim;
            if (seen.first == seen.last) {
                if (whole) continue;
                store(most, set1(kNothing)), store(total, zero());
                std::fill(values, values + size_t(n) * dim, 0.0f);
                continue;
            }
            Sight each;
            for (int i = 0; i < n; i++) {
                const int token = unit.first + (first_row + i) / group;
                const Range of_row = sight(token, token + 1, stretch);
                each.first[i] = of_row.first, each.last[i] = of_row.last;
            }
            attend_group<Kv, kAttentionRows>(n, layer_, at, g == 0 ? later : at, each, seen.first, seen.last,
                                             queries_ + first_row * kQueryWords<Kv>, most, total, values, whole);
        }
    }

    void merge(const Softmax &state, const Softmax &more, int rows) const {
        const Groups groups(rows);
        const int dim = layer_.head_dim;
        alignas(64) float old_factor[kLanes], new_factor[kLanes];
        for (int g = 0; g < groups.n; g++) {
            const int at = g * kLanes;
            merge_sums(state.most + at, state.total + at, more.most + at, more.total + at, old_factor, new_factor);
            for (int i = 0; i < groups.size(g); i++) {
                const size_t row = size_t(groups.first(g) + i) * dim;
                for (int d = 0; d < dim; d += kLanes) {
                    F32 x = merge_values(load(state.values + row + d), old_factor[i], load(more.values + row + d), new_factor[i]);
                    store(state.values + row + d, x);
                }
            }
        }
    }

    const AttentionLayer &layer_;
    const astrai_step &step_;
    const AttentionWork &work_;
    const int rows_;
    uint32_t *const queries_;
    float *const state_;
    uint8_t *const copies_;
};

// Attends for all tokens of the step: out [T, H, D]. Every worker calls it, after a barrier that follows the last store_kv and
// `claims.open(work.items())`; results are complete after the next barrier. Allocates nothing.
inline void attend(const AttentionLayer &layer, const astrai_step &step, const AttentionWork &work, Pool::Claims &claims,
                   float *scratch, const float *q, int64_t q_stride, float *out, int64_t out_stride) {
    auto all = [&](const auto &attending) {
        for (int i; (i = claims.take(1)) >= 0;) attending.run(i, q, q_stride, out, out_stride);
    };
    if (layer.kv_format == ASTRAI_BFLOAT16) {
        all(Attending<Bfloat16Kv>(layer, step, work, scratch));
    } else {
        all(Attending<Float32Kv>(layer, step, work, scratch));
    }
}

}  // namespace astrai::ASTRAI_ISA

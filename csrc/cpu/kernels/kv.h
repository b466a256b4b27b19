// The paged KV pool (see astrai_kv) as attention sees it: one layer's blocks, how the numbers of a format are multiplied,
// where a sequence's positions lie, and writing new ones.
#pragma once

#include <algorithm>
#include <cstring>

#include "../include/astrai_cpu.h"

namespace astrai::ASTRAI_ISA {

constexpr int kStretch = 128;                    // positions that are attended to at a time
constexpr int kBlockSlots = 16;                  // slots of one block of the pool
constexpr int kBlocks = kStretch / kBlockSlots;  // of a stretch
constexpr int kMaxHeadDim = 256;

// One layer of one step: `k` and `v` are its blocks.
struct AttentionLayer {
    int n_heads, n_kv_heads, head_dim;
    int window;  // tokens that a query sees, itself included; 0: all
    float scale;
    int kv_format;
    void *k, *v;

    int group() const { return n_heads / n_kv_heads; }
    size_t line() const { return size_t(head_dim) * (kv_format == ASTRAI_BFLOAT16 ? 2 : 4); }  // bytes of a token's head
    size_t head_bytes() const { return line() * kBlockSlots; }
    size_t block_bytes() const { return head_bytes() * size_t(n_kv_heads); }
};

// How the numbers of a KV format are multiplied: a word of 32 bits holds one feature of a query or one weight, or two of
// them, and meets 16 lanes of as many features of keys or values.
struct Bfloat16Kv {
    using Lanes = Pairs;
    static constexpr int kNumbers = 2;  // in a word
    static Lanes lanes(const uint8_t *p) { return load_pairs(reinterpret_cast<const uint16_t *>(p)); }
    static F32 dot(F32 sum, Lanes x, uint32_t word) { return dot_pairs(sum, x, word); }
    static void words(uint32_t *to, F32 x) { store_bfloat16(reinterpret_cast<uint16_t *>(to), x); }
    static Lanes only(Lanes x, bool first, bool second) {
        if (!first) x = second_of_pairs(x);
        return second ? x : first_of_pairs(x);
    }
};

struct Float32Kv {
    using Lanes = F32;
    static constexpr int kNumbers = 1;
    static Lanes lanes(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }
    static F32 dot(F32 sum, Lanes x, uint32_t word) {
        float one;
        std::memcpy(&one, &word, 4);
        return fma(x, set1(one), sum);
    }
    static void words(uint32_t *to, F32 x) { store(reinterpret_cast<float *>(to), x); }
    static Lanes only(Lanes x, bool, bool) { return x; }
};

// The blocks of one stretch for one KV head.
struct Stretch {
    const uint8_t *k[kBlocks], *v[kBlocks];
    bool in_order[kBlocks];  // the 16 positions are the block's lanes
};

// The keys and values of one sequence for one KV head.
class Context {
  public:
    Context(const AttentionLayer &layer, const astrai_step &step, int sequence, int kv_head)
        : slots_(step.kv.table + step.rows[sequence] * step.kv.table_stride), block_bytes_(layer.block_bytes()),
          line_(layer.line()), k_(static_cast<const uint8_t *>(layer.k) + kv_head * layer.head_bytes()),
          v_(static_cast<const uint8_t *>(layer.v) + kv_head * layer.head_bytes()) {}

    // Where positions first..last of the stretch lie; only their slots are looked up. Of positions that are not one block in
    // their order, the block of the last: it is worth fetching early.
    Stretch find(int stretch, int first, int last) const {
        Stretch found{};
        for_each_block(stretch, first, last, [&](int block, const int32_t *slots, int from, int to) {
            const int32_t base = slots[from] - from;
            bool in_order = base >= 0 && base % kBlockSlots == 0;
            if (in_order && from == 0 && to == kBlockSlots) {
                in_order = equal(load_int(slots), add(set1_int(base), counting())) == 0xffff;
            } else {
                for (int i = from; in_order && i < to; i++) in_order = slots[i] == base + i;
            }
            found.k[block] = block_of(k_, slots[to - 1]), found.v[block] = block_of(v_, slots[to - 1]);
            found.in_order[block] = in_order;
        });
        return found;
    }

    // Copies what `found` has not in order into blocks of the same form at `copies`.
    template <class Kv> void gather(Stretch &found, int stretch, int first, int last, uint8_t *copies) const {
        const size_t bytes = line_ * kBlockSlots;
        for_each_block(stretch, first, last, [&](int block, const int32_t *slots, int from, int to) {
            if (found.in_order[block]) return;
            uint8_t *k = copies + size_t(block) * 2 * bytes, *v = k + bytes;
            gather_keys(slots, from, to, k);
            gather_values<Kv>(slots, from, to, v);
            found.k[block] = k, found.v[block] = v;
        });
    }

  private:
    template <class Visit> void for_each_block(int stretch, int first, int last, const Visit &visit) const {
        for (int block = first / kBlockSlots, begin; (begin = block * kBlockSlots) < last; block++) {
            const int32_t *slots = slots_ + int64_t(stretch) * kStretch + begin;
            visit(block, slots, std::max(first - begin, 0), std::min(last - begin, kBlockSlots));
        }
    }

    const uint8_t *block_of(const uint8_t *blocks, int32_t slot) const {
        return blocks + size_t(slot / kBlockSlots) * block_bytes_;
    }

    void gather_keys(const int32_t *slots, int from, int to, uint8_t *k) const {  // runs of lanes, 32 bits each
        for (int i = from, n; i < to; i += n) {
            const int lane = slots[i] % kBlockSlots;
            for (n = 1; i + n < to && slots[i + n] == slots[i] + n && lane + n < kBlockSlots;) n++;
            const uint8_t *source = block_of(k_, slots[i]) + lane * 4;
            for (size_t row = 0; row < line_ * kBlockSlots; row += 64) {
                F32 bits = load_first(reinterpret_cast<const float *>(source + row), n);
                store_first(reinterpret_cast<float *>(k + row + i * 4), bits, n);
            }
        }
    }

    template <class Kv> void gather_values(const int32_t *slots, int from, int to, uint8_t *v) const {
        if constexpr (Kv::kNumbers == 1) {
            for (int i = from; i < to; i++) {
                std::memcpy(v + i * line_, block_of(v_, slots[i]) + slots[i] % kBlockSlots * line_, line_);
            }
        } else {
            for (int i = from & ~1; i < to; i += 2) {  // at the borders, the one that is not there is as the other
                const int32_t one = slots[i < from ? i + 1 : i], two = slots[i + 1 < to ? i + 1 : i];
                auto pairs = [&](int32_t slot) { return block_of(v_, slot) + slot % kBlockSlots / 2 * 2 * line_; };
                const uint8_t *a = pairs(one), *b = pairs(two);
                const int shift_a = one % 2 * 16, shift_b = two % 2 * 16;
                uint8_t *to_pairs = v + i * line_;
                for (size_t at = 0; at < 2 * line_; at += 4) {
                    uint32_t x, y;
                    std::memcpy(&x, a + at, 4), std::memcpy(&y, b + at, 4);
                    x = (x >> shift_a & 0xffff) | (y >> shift_b << 16);
                    std::memcpy(to_pairs + at, &x, 4);
                }
            }
        }
    }

    const int32_t *slots_;
    size_t block_bytes_, line_;
    const uint8_t *k_, *v_;
};

// Writes keys and values of `first`..`last` of the T * K (token, KV head) pairs into the pool. `stride`: floats from token to
// token.
inline void store_kv(const AttentionLayer &layer, const astrai_step &step, const float *k, const float *v, int64_t stride,
                     int first, int last) {
    const int dim = layer.head_dim;
    const size_t line = layer.line();
    alignas(64) uint16_t keys[kMaxHeadDim], values[kMaxHeadDim];
    for (int i = first, sequence = 0; i < last; i++) {
        const int token = i / layer.n_kv_heads, head = i % layer.n_kv_heads;
        while (step.starts[sequence + 1] <= token) sequence++;
        const int32_t slot = step.kv.table[step.rows[sequence] * step.kv.table_stride + step.positions[token]];
        const size_t at = size_t(slot / kBlockSlots) * layer.block_bytes() + head * layer.head_bytes();
        const int lane = slot % kBlockSlots;
        uint8_t *to_k = static_cast<uint8_t *>(layer.k) + at + lane * 4;
        uint8_t *to_v = static_cast<uint8_t *>(layer.v) + at + lane / 2 * 2 * line;
        const float *from_k = k + token * stride + head * dim, *from_v = v + token * stride + head * dim;
        if (layer.kv_format == ASTRAI_BFLOAT16) {
            for (int d = 0; d < dim; d += kLanes) {
                store_bfloat16(keys + d, load(from_k + d)), store_bfloat16(values + d, load(from_v + d));
            }
            for (int d = 0; d < dim; d += 2) std::memcpy(to_k + d * 32, keys + d, 4);
            uint16_t *pairs = reinterpret_cast<uint16_t *>(to_v) + lane % 2;
            for (int d = 0; d < dim; d++) pairs[2 * d] = values[d];  // the other of the pair may be another thread's
        } else {
            for (int d = 0; d < dim; d++) std::memcpy(to_k + d * 64, from_k + d, 4);
            std::memcpy(to_v + lane % 2 * line, from_v, line);
        }
    }
}

}  // namespace astrai::ASTRAI_ISA

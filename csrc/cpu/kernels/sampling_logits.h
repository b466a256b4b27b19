// One row of logits: a pass over the vocabulary finds the largest value of each block of 256, and the searches that follow read
// the few blocks that can matter.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "../include/astrai_cpu.h"

namespace astrai::ASTRAI_ISA {


constexpr int kBlock = 256;  // a vocabulary of 262,144 has 1,024 blocks
constexpr int kFew = 256;    // candidates up to which the C library's exp is used, as Python uses it for so many
constexpr float kRemoved = -std::numeric_limits<float>::infinity();

constexpr int kDamaged = -1, kNothingLeft = -2;  // in place of a token

struct Candidate {
    int32_t id;
    float value;
};

inline uint64_t bits_of(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

inline double number_of(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}

// e^x for x <= 0 within 2 units in the last place; 0 below -709. Only operations that round once, and that the compiler may
// not fuse (-ffp-contract=off): the bits are the same on every instruction set. Loops over it become vector code, which a
// comparison of numbers that may be NaN would prevent.
inline double exp_of_negative(double x) {
    constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to the nearest whole number
    constexpr double kLeast = -709.1;              // its power of two has exponent 0 and is therefore 0
    const uint64_t below = 0 - (bits_of(x - kLeast) >> 63);
    const double safe = number_of((bits_of(x) & ~below) | (bits_of(kLeast) & below));
    const double shifted = safe * 1.4426950408889634 + kShift;
    const double n = shifted - kShift;
    const double r = (safe - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * number_of((bits_of(shifted) << 52) + (uint64_t(1023) << 52));  // n is in the low bits of `shifted`
}

// One row of logits and the largest value of each of its blocks.
class Logits {
  public:
    Logits(float *x, int n, float *maxima) : x_(x), n_(n), maxima_(maxima) {}

    static int blocks_of(int n) { return (n + kBlock - 1) / kBlock; }
    int size() const { return n_; }
    int blocks() const { return blocks_of(n_); }
    float operator[](int id) const { return x_[id]; }

    // Finds the largest value of blocks first..last - 1. False: NaN or +infinity is among their values.
    bool look(int first, int last) {
        I32 magnitude = zero_int();
        float best = kRemoved;
        for (int b = first; b < last; b++) {
            const float *block = x_ + b * kBlock;
            const int length = length_of(b);
            F32 most[4] = {set1(kRemoved), set1(kRemoved), set1(kRemoved), set1(kRemoved)};
            int i = 0;
            for (; i + 4 * kLanes <= length; i += 4 * kLanes) {
                for (int j = 0; j < 4; j++) {
                    F32 values = load(block + i + j * kLanes);
                    most[j] = max(values, most[j]);
                    magnitude = max_magnitude(magnitude, values);
                }
            }
            for (; i < length; i += kLanes) {
                F32 values = part(block + i, length - i);
                most[0] = max(values, most[0]);
                magnitude = max_magnitude(magnitude, values);
            }
            maxima_[b] = largest(max(max(most[0], most[1]), max(most[2], most[3])));
            best = std::max(best, maxima_[b]);
        }
        return best < std::numeric_limits<float>::infinity() && largest(magnitude) <= 0x7f800000;  // NaN's bits are above
    }

    float best() const { return *std::max_element(maxima_, maxima_ + blocks()); }

    // The lowest id of the largest value.
    int first_best() const {
        const float most = best();
        const int b = int(std::find(maxima_, maxima_ + blocks(), most) - maxima_);
        const float *block = x_ + b * kBlock;
        return b * kBlock + int(std::find(block, block + length_of(b), most) - block);
    }

    void set(int id, float value) {
        const int b = id / kBlock;
        const float before = x_[id];
        x_[id] = value;
        if (value >= maxima_[b]) {
            maxima_[b] = value;
        } else if (before == maxima_[b]) {
            look(b, b + 1);
        }
    }

    // (x - best) / t. Rounding keeps the order, so that the largest values of the blocks stay the largest.
    void temper(float t) {
        const F32 most = set1(best()), divisor = set1(t);
        auto apply = [&](float *values, int n) {
            int i = 0;
            for (; i + kLanes <= n; i += kLanes) store(values + i, div(sub(load(values + i), most), divisor));
            if (i < n) store_first(values + i, div(sub(load_first(values + i, n - i), most), divisor), n - i);
        };
        apply(x_, n_), apply(maxima_, blocks());
    }

    // Appends the values that reach `border`, in order of id; stops when there are more than `limit`.
    void gather(float border, std::vector<Candidate> &found, size_t limit = SIZE_MAX) const {
        const F32 least = set1(border);
        for (int first = 0; first < blocks(); first += kLanes) {
            uint32_t hot = reaching(maxima_ + first, blocks() - first, least);
            for (; hot; hot &= hot - 1) {
                const int b = first + __builtin_ctz(hot), length = length_of(b);
                for (int i = 0; i < length; i += kLanes) {
                    const int at = b * kBlock + i;
                    for (uint32_t bits = reaching(x_ + at, length - i, least); bits; bits &= bits - 1) {
                        const int id = at + __builtin_ctz(bits);
                        found.push_back({id, x_[id]});
                    }
                }
                if (found.size() > limit) return;  // block by block
            }
        }
    }

    // A value that k others reach, near the k-th largest: one that k blocks hold, or k groups of a register's width where the
    // blocks are too few; the lowest number for still larger k.
    float border_of(int k, std::vector<float> &scratch) const {
        if (k <= blocks()) {
            scratch.assign(maxima_, maxima_ + blocks());
        } else if (k <= n_ / kLanes) {
            scratch.clear();
            for (int i = 0; i < n_; i += kLanes) scratch.push_back(largest(part(x_ + i, n_ - i)));
        } else {
            return std::numeric_limits<float>::lowest();
        }
        std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<float>());
        return std::max(scratch[size_t(k - 1)], std::numeric_limits<float>::lowest());
    }

    // Sum of e^(x - best) over one block, in an order that depends on nothing.
    double weight_of_block(int b, double best) const {
        constexpr int kSums = 8;
        double weights[kBlock], sums[kSums] = {}, total = 0;
        weigh_block(b, best, weights);
        for (int i = 0; i < kBlock; i += kSums) {
            for (int j = 0; j < kSums; j++) sums[j] += weights[i + j];
        }
        for (double sum : sums) total += sum;
        return total;
    }

    // e^(x - best) of each value of a block; 0 past the end of the row.
    void weigh_block(int b, double best, double *weights) const {
        const float *block = x_ + b * kBlock;
        const int length = length_of(b);
        for (int i = 0; i < length; i++) weights[i] = exp_of_negative(double(block[i]) - best);
        for (int i = length; i < kBlock; i++) weights[i] = 0.0;
    }

    int length_of(int block) const { return std::min(kBlock, n_ - block * kBlock); }

  private:
    static F32 part(const float *p, int n) {
        return n >= kLanes ? load(p) : keep_first(load_first(p, n), n, set1(kRemoved));
    }
    static uint32_t reaching(const float *p, int n, F32 border) {
        const uint32_t below = greater(border, part(p, n));
        return ~below & (n >= kLanes ? 0xffffu : (1u << n) - 1);
    }

    float *x_;
    int n_;
    float *maxima_;
};

}  // namespace astrai::ASTRAI_ISA

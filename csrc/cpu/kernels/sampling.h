// From logits to tokens. One pass over the vocabulary finds the largest value of each block of 256; the searches that follow
// read the few blocks that can matter, and once a row is cut to candidates the vocabulary is not looked at again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "../pool.h"
#include "../sampler.h"

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

// Does to one row what its operations say, and chooses. Holds one worker's scratch memory.
class Chooser {
  public:
    explicit Chooser(int n) : counts_(size_t(n)), sums_(size_t(Logits::blocks_of(n))) { left_.reserve(size_t(n)); }

    int choose(const astrai_choice &asked, Logits row) {
        row_ = &row, whole_ = true;
        left_.clear();
        const astrai_operation *operation = asked.operations, *end = operation + asked.n_operations;
        for (; operation < end; operation++) {
            const bool cuts_next = operation->kind == ASTRAI_TEMPERATURE && operation + 1 < end && operation[1].kind == ASTRAI_TOP_K;
            if (cuts_next && whole_ && operation[1].value > 0 && operation[1].value < row.size()) {
                tempered_top_k(float(operation->value), int(operation[1].value));
                operation++;
            } else {
                apply(*operation, asked);
            }
        }
        row_ = nullptr;
        const int token = asked.u < 0.0 ? likeliest(row) : draw(row, asked.u);
        return token < 0 ? kNothingLeft : token;
    }

    // The k largest values of a whole row, largest first.
    const std::vector<Candidate> &largest_of(Logits row, int k) {
        row_ = &row, whole_ = true;
        top_k(k);
        if (whole_) keep_from(std::numeric_limits<float>::lowest());
        row_ = nullptr;
        std::sort(left_.begin(), left_.end(),
                  [](Candidate a, Candidate b) { return a.value != b.value ? a.value > b.value : a.id < b.id; });
        return left_;
    }

  private:
    void apply(const astrai_operation &operation, const astrai_choice &asked) {
        switch (operation.kind) {
            case ASTRAI_PENALTIES: return penalise(operation.values, asked);
            case ASTRAI_LOGIT_BIAS: return bias(operation);
            case ASTRAI_TEMPERATURE: return temper(float(operation.value));
            case ASTRAI_TOP_K: return top_k(int(operation.value));
            case ASTRAI_TOP_P: return top_p(operation.value);
            case ASTRAI_MIN_P: return keep_from(float(double(best()) + std::log(operation.value)));
        }
    }

    float best() const {
        if (whole_) return row_->best();
        float most = kRemoved;
        for (Candidate each : left_) most = std::max(most, each.value);
        return most;
    }

    // -- edits of listed ids ------------------------------------------------------------------------------------

    // Calls edit(value) of a token that is still there.
    template <class Edit> void change(int id, Edit edit) {
        if (id < 0 || id >= row_->size()) return;
        if (whole_) {
            row_->set(id, edit((*row_)[id]));
            return;
        }
        auto at = std::lower_bound(left_.begin(), left_.end(), id, [](Candidate each, int wanted) { return each.id < wanted; });
        if (at != left_.end() && at->id == id) at->value = edit(at->value);
    }

    // Repetition for tokens of the whole text, frequency and presence for those after the prompt; each token once.
    void penalise(const float *amounts, const astrai_choice &asked) {
        const float repetition = amounts[0], frequency = amounts[1], presence = amounts[2];
        const int n = row_->size();
        auto each_once = [&](int first, auto edit) {
            for (int i = first; i < asked.n_tokens; i++) {
                const int id = asked.tokens[i];
                if (id >= 0 && id < n) counts_[size_t(id)]++;
            }
            for (int i = first; i < asked.n_tokens; i++) {
                const int id = asked.tokens[i];
                if (id < 0 || id >= n || counts_[size_t(id)] == 0) continue;
                edit(id, counts_[size_t(id)]);
                counts_[size_t(id)] = 0;
            }
        };
        if (repetition != 1.0f) {
            each_once(0, [&](int id, int) {
                change(id, [&](float value) { return value > 0.0f ? value / repetition : value * repetition; });
            });
        }
        if (frequency != 0.0f || presence != 0.0f) {
            each_once(asked.n_prompt, [&](int id, int count) {
                change(id, [&](float value) { return value - (float(count) * frequency + presence); });
            });
        }
    }

    // -100 removes a token; +100 removes all that have less.
    void bias(const astrai_operation &operation) {
        bool forced = false;
        for (int i = 0; i < operation.n; i++) {
            const float amount = operation.values[i];
            change(operation.ids[i], [&](float value) { return amount == -100.0f ? kRemoved : value + amount; });
            forced = forced || amount == 100.0f;
        }
        if (!forced) return;
        spare_.clear();
        for (int i = 0; i < operation.n; i++) {
            if (operation.values[i] == 100.0f) spare_.push_back({operation.ids[i], value_of(operation.ids[i])});
        }
        std::sort(spare_.begin(), spare_.end(), [](Candidate a, Candidate b) { return a.id < b.id; });
        left_.swap(spare_);
        whole_ = false;
    }

    float value_of(int id) const {
        if (whole_) return (*row_)[id];
        for (Candidate each : left_) {
            if (each.id == id) return each.value;
        }
        return kRemoved;
    }

    // -- edits of all that is left ------------------------------------------------------------------------------

    void temper(float t) {
        if (whole_) return row_->temper(t);
        const float most = best();
        for (Candidate &each : left_) each.value = (each.value - most) / t;
    }

    void top_k(int k) {
        if (k <= 0 || k >= (whole_ ? row_->size() : int(left_.size()))) return;
        if (whole_) keep_from(row_->border_of(k, values_));
        if (int(left_.size()) <= k) return;
        values_.clear();
        for (Candidate each : left_) values_.push_back(each.value);
        std::nth_element(values_.begin(), values_.begin() + (k - 1), values_.end(), std::greater<float>());
        const float border = values_[size_t(k - 1)];
        const auto above = std::count_if(left_.begin(), left_.end(), [&](Candidate each) { return each.value > border; });
        int level = k - int(above);  // places for the lowest ids among the equals
        auto goes = [&](Candidate each) { return each.value < border || (each.value == border && level-- <= 0); };
        left_.erase(std::remove_if(left_.begin(), left_.end(), goes), left_.end());
    }

    // `temper`, then `top_k`, without a pass over the whole row: only values that can be among the k are divided. Rounding may
    // make values equal that were not, so that some below the border count too: those closer to it than the errors of (x -
    // best) / t, which are below 3e-7 of its distance to the best.
    void tempered_top_k(float t, int k) {
        constexpr float kLowest = std::numeric_limits<float>::lowest();
        const float border = row_->border_of(k, values_);
        keep_from(border > kLowest ? std::max(border - (row_->best() - border) * 1e-6f, kLowest) : kLowest);
        temper(t);
        top_k(k);
    }

    // Removes every value below `border`.
    void keep_from(float border) {
        if (whole_) {
            left_.clear();
            row_->gather(border, left_);
            whole_ = false;
        } else {
            auto goes = [&](Candidate each) { return each.value < border; };
            left_.erase(std::remove_if(left_.begin(), left_.end(), goes), left_.end());
        }
    }

    // The fewest tokens, highest first and ties by lowest id, whose weights sum to p of all.
    void top_p(double p) {
        if (whole_) narrow_if_few(*row_);
        const double most = best();
        if (!whole_) {
            weigh(most);
            double total = 0;
            for (const Ranked &each : ranked_) total += each.weight;
            keep_ranked(first_reaching(p * total), most);
            return;
        }
        const double goal = p * weigh_whole(*row_, most);
        for (double window : {2.0, 4.0, 6.0, 8.0, 10.0, 13.0, 20.0, double(INFINITY)}) {
            left_.clear();
            row_->gather(std::isinf(window) ? std::numeric_limits<float>::lowest() : float(most - window), left_);
            weigh(most);
            double total = 0;
            for (const Ranked &each : ranked_) total += each.weight;
            if (total < 0.999 * goal && !std::isinf(window)) continue;  // surely too few, and sorting is dear
            const size_t count = first_reaching(goal);
            if (count == ranked_.size() && !std::isinf(window)) continue;
            whole_ = false;
            return keep_ranked(count, most);
        }
    }

    struct Ranked {
        double rank;
        double weight;
        Candidate candidate;
    };

    void weigh(double most) {
        ranked_.clear();
        const bool few = left_.size() <= size_t(kFew);
        for (size_t i = 0; i < left_.size(); i++) {
            const double rank = double(left_[i].value) - most;
            ranked_.push_back({rank, few ? std::exp(rank) : exp_of_negative(rank), left_[i]});
        }
    }

    static bool comes_first(const Ranked &a, const Ranked &b) {
        return a.rank != b.rank ? a.rank > b.rank : a.candidate.id < b.candidate.id;
    }

    // How many it takes, highest first and at least one, until their weights reach `goal`; the last of them is in its place.
    // Halves that lie on one side of that place are not sorted.
    size_t first_reaching(double goal) {
        const auto begin = ranked_.begin();
        size_t low = 0, high = ranked_.size();
        double sum = 0;
        while (high - low > size_t(kFew)) {
            const size_t middle = low + (high - low) / 2;
            std::nth_element(begin + long(low), begin + long(middle), begin + long(high), comes_first);
            double upper = 0;
            for (size_t i = low; i < middle; i++) upper += ranked_[i].weight;
            if (sum + upper < goal) {
                sum += upper, low = middle;
            } else {
                high = middle;
            }
        }
        std::sort(begin + long(low), begin + long(high), comes_first);
        while (low < high && (low == 0 || sum < goal)) sum += ranked_[low++].weight;
        return low;
    }

    void keep_ranked(size_t count, double most) {
        if (count == 0) return left_.clear();  // nothing was left to begin with
        const Ranked last = ranked_[count - 1];
        auto goes = [&](Candidate each) { return comes_first(last, {double(each.value) - most, 0.0, each}); };
        left_.erase(std::remove_if(left_.begin(), left_.end(), goes), left_.end());
    }

    // A row of which at most kFew tokens are left becomes candidates.
    void narrow_if_few(const Logits &row) {
        left_.clear();
        row.gather(std::numeric_limits<float>::lowest(), left_, kFew);
        whole_ = left_.size() > size_t(kFew);
    }

    // -- the choice ---------------------------------------------------------------------------------------------

    int likeliest(const Logits &row) const {
        if (whole_) return row.best() > kRemoved ? row.first_best() : -1;
        const Candidate *most = nullptr;
        for (const Candidate &each : left_) {
            if (each.value > kRemoved && (!most || each.value > most->value)) most = &each;
        }
        return most ? most->id : -1;
    }

    double weigh_whole(const Logits &row, double most) {
        double total = 0;
        for (int b = 0; b < row.blocks(); b++) total += sums_[size_t(b)] = row.weight_of_block(b, most);
        return total;
    }

    // The token whose share contains u, shares laid out in order of id.
    int draw(const Logits &row, double u) {
        if (whole_) narrow_if_few(row);
        if (whole_) return draw_whole(row, u);
        double most = -INFINITY;
        for (Candidate each : left_) most = std::max(most, double(each.value));
        if (!std::isfinite(most)) return -1;
        weigh(most);
        double total = 0, end = 0;
        for (const Ranked &each : ranked_) total += each.weight;
        const double wanted = u * total;
        int last = -1;
        for (const Ranked &each : ranked_) {
            end += each.weight;
            if (end > wanted) return each.candidate.id;
            if (each.weight > 0.0) last = each.candidate.id;
        }
        return last;  // u * total was rounded up to the total
    }

    int draw_whole(const Logits &row, double u) {
        const double most = row.best();
        const double wanted = u * weigh_whole(row, most);
        double end = 0;
        int last = -1;
        for (int b = 0; b < row.blocks(); b++) {
            if (sums_[size_t(b)] > 0.0) last = b;
            if (end + sums_[size_t(b)] > wanted) break;
            end += sums_[size_t(b)];
        }
        if (last < 0) return -1;
        double weights[kBlock];
        row.weigh_block(last, most, weights);
        int chosen = -1;
        for (int i = 0; i < row.length_of(last); i++) {
            end += weights[i];
            if (weights[i] > 0.0) chosen = last * kBlock + i;
            if (weights[i] > 0.0 && end > wanted) break;
        }
        return chosen;
    }

    Logits *row_ = nullptr;
    bool whole_ = true;             // nothing was cut away; else `left_` is the row
    std::vector<Candidate> left_;   // in order of id
    std::vector<Candidate> spare_;
    std::vector<Ranked> ranked_;
    std::vector<float> values_;
    std::vector<int32_t> counts_;   // [V], all 0 between uses
    std::vector<double> sums_;      // [blocks]
};

// Splits rows and blocks over a pool. What a row becomes does not depend on the split.
class PooledSampler final : public Sampler {
  public:
    PooledSampler(Pool &pool, int n) : pool_(pool), n_(n), sums_(size_t(Logits::blocks_of(n))) {
        for (int worker = 0; worker < pool.threads(); worker++) choosers_.emplace_back(n);
    }

    void choose(astrai_choice *rows, int n_rows) override {
        const int blocks = Logits::blocks_of(n_), pieces = (blocks + kPiece - 1) / kPiece;
        prepare(n_rows);
        looks_.open(n_rows * pieces), choices_.open(n_rows);
        auto look_at_all = [&](int) {
            for (int piece; (piece = looks_.take(1)) >= 0;) look(rows[piece / pieces].logits, piece / pieces, piece % pieces * kPiece);
        };
        auto choose_all = [&](int worker) {
            for (int r; (r = choices_.take(1)) >= 0;) {
                Logits row = logits(rows[r].logits, r);
                const bool sound = !damaged_[size_t(r)].load(std::memory_order_relaxed) && row.best() > kRemoved;
                rows[r].token = sound ? choosers_[size_t(worker)].choose(rows[r], row) : kDamaged;
            }
        };
        int64_t looked = 0;
        for (int r = 0; r < n_rows; r++) looked += stays_whole(rows[r]) ? kWeighing * n_ : n_;
        run(looked, look_at_all, choose_all);
    }

    double likeliest(const float *values_of_row, int k, int32_t *ids, float *values) override {
        float *x = const_cast<float *>(values_of_row);  // only read
        const int blocks = Logits::blocks_of(n_), pieces = (blocks + kPiece - 1) / kPiece;
        prepare(1);
        looks_.open(pieces), choices_.open(pieces);
        auto look_at_all = [&](int) {
            for (int piece; (piece = looks_.take(1)) >= 0;) look(x, 0, piece * kPiece);
        };
        auto weigh_all = [&](int) {
            const Logits row = logits(x, 0);
            const double best = row.best();
            for (int piece; (piece = choices_.take(1)) >= 0;) {
                for (int b = piece * kPiece; b < std::min(blocks, (piece + 1) * kPiece); b++) sums_[size_t(b)] = row.weight_of_block(b, best);
            }
        };
        run(kWeighing * int64_t(n_), look_at_all, weigh_all);
        if (damaged_[0].load(std::memory_order_relaxed)) return std::numeric_limits<double>::quiet_NaN();
        double total = 0;
        for (double sum : sums_) total += sum;
        if (k > 0) {
            const std::vector<Candidate> &found = choosers_[0].largest_of(logits(x, 0), k);
            int i = 0;
            for (; i < k && i < int(found.size()); i++) ids[i] = found[size_t(i)].id, values[i] = found[size_t(i)].value;
            if (i < k) pad_with_removed(x, ids, values, i, std::min(k, n_));
        }
        return double(logits(x, 0).best()) + std::log(total);
    }

  private:
    static constexpr int kPiece = 16;         // blocks that are handed out together: 16 KiB
    static constexpr int64_t kWeighing = 8;   // exponentials of a row cost so many times what finding its largest value does
    static constexpr int64_t kAlone = 1 << 22;  // values that one thread looks at in a third of a millisecond

    // Runs both, the second when the first is done. Between two steps the pool's threads are asleep: on a busy machine waking
    // them takes longer than a little work.
    template <class First, class Second> void run(int64_t looked, First &first, Second &second) {
        if (looked <= kAlone) {
            first(0), second(0);
            return;
        }
        auto work = [&](int worker) {
            first(worker);
            pool_.barrier();
            second(worker);
        };
        pool_.run(work);
    }

    static bool stays_whole(const astrai_choice &asked) {
        if (asked.u < 0.0) return false;
        const astrai_operation *end = asked.operations + asked.n_operations;
        return std::none_of(asked.operations, end, [](const astrai_operation &each) { return each.kind == ASTRAI_TOP_K; });
    }

    Logits logits(float *x, int r) { return {x, n_, maxima_.data() + size_t(r) * size_t(Logits::blocks_of(n_))}; }

    void look(float *x, int r, int first) {
        if (!logits(x, r).look(first, std::min(first + kPiece, Logits::blocks_of(n_)))) damaged_[size_t(r)].store(true, std::memory_order_relaxed);
    }

    void prepare(int n_rows) {
        const size_t wanted = size_t(n_rows) * size_t(Logits::blocks_of(n_));
        if (maxima_.size() < wanted) maxima_.resize(wanted);
        if (damaged_.size() < size_t(n_rows)) damaged_ = std::vector<std::atomic<bool>>(size_t(n_rows));
        for (auto &each : damaged_) each.store(false, std::memory_order_relaxed);
    }

    // Tokens at -infinity come last, lowest ids first.
    void pad_with_removed(const float *x, int32_t *ids, float *values, int from, int k) const {
        for (int id = 0; id < n_ && from < k; id++) {
            if (x[id] == kRemoved) ids[from] = id, values[from] = kRemoved, from++;
        }
    }

    Pool &pool_;
    const int n_;
    std::vector<Chooser> choosers_;
    std::vector<float> maxima_;             // [rows, blocks]
    std::vector<std::atomic<bool>> damaged_;  // [rows]
    std::vector<double> sums_;              // [blocks]
    Pool::Claims looks_, choices_;
};

}  // namespace astrai::ASTRAI_ISA

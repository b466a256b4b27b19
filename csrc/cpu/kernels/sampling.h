// From logits to tokens: the rows of a step, shared out to the threads of a pool.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../pool.h"
#include "../sampler.h"
#include "sampling_row.h"

namespace astrai::ASTRAI_ISA {

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

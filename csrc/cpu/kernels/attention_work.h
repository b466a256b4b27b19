// What there is to attend to in one step, cut into pieces that threads claim.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../memory.h"
#include "attention_rows.h"

namespace astrai::ASTRAI_ISA {

constexpr int kTileRows = 64;  // rows of one piece of work, unless one token has more

inline void check_attention(int n_heads, int n_kv_heads, int head_dim) {
    if (n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0 && head_dim > 0 && head_dim % kLanes == 0 &&
        head_dim <= kMaxHeadDim) {
        return;
    }
    throw std::invalid_argument("attention with " + std::to_string(n_heads) + " heads of size " + std::to_string(head_dim) +
                                " over " + std::to_string(n_kv_heads) + ": sizes are multiples of 16 up to " +
                                std::to_string(kMaxHeadDim) + ", and each key/value head serves as many query heads");
}

// The work of a step, the same for all layers of one shape: pieces that threads claim. One thread prepares it; its memory is
// kept from step to step.
class AttentionWork {
  public:
    struct Unit {  // a few tokens of one sequence and the query heads of one KV head
        int sequence, kv_head;
        int first, last;     // tokens of the step
        int splits;          // parts of the context that are claimed one by one; 1: all of it at once
        int64_t records;     // where the stretches' results are kept when there are several
        int64_t cost;
    };
    struct Item {
        int unit, split;
    };

    // Throws std::invalid_argument for shapes that the kernel does not have.
    void prepare(const astrai_step &step, int n_heads, int n_kv_heads, int head_dim, int threads) {
        check_attention(n_heads, n_kv_heads, head_dim);
        const int group = n_heads / n_kv_heads, tile = std::max(1, kTileRows / group);
        units_.clear(), items_.clear();
        threads_ = threads;
        int64_t total = 0, floats = 0;
        for (int sequence = 0; sequence < step.n_sequences; sequence++) {
            const int end = step.starts[sequence + 1];
            for (int first = step.starts[sequence]; first < end; first += tile) {
                const int last = std::min(first + tile, end);
                const int64_t cost = int64_t(last - first) * stretches(step.positions[last - 1]);
                for (int head = 0; head < n_kv_heads; head++) units_.push_back({sequence, head, first, last, 1, 0, cost});
                total += cost * n_kv_heads;
            }
        }
        std::sort(units_.begin(), units_.end(), [](const Unit &a, const Unit &b) {
            return a.cost != b.cost ? a.cost > b.cost : a.first != b.first ? a.first < b.first : a.kv_head < b.kv_head;
        });
        // No piece so large that other threads wait long for it.
        const int64_t most = std::max<int64_t>(1, total / (2 * threads));
        for (Unit &unit : units_) {
            const int64_t n = stretches(step.positions[unit.last - 1]);
            if (threads > 1) unit.splits = int(std::min(n, (unit.cost + most - 1) / most));
            if (unit.splits > 1) {
                unit.records = floats;
                floats += n * Softmax::floats((unit.last - unit.first) * group, head_dim);
            }
            for (int split = 0; split < unit.splits; split++) items_.push_back({int(&unit - units_.data()), split});
        }
        if (records_.bytes() < size_t(floats) * sizeof(float)) records_.reserve(size_t(floats + floats / 2) * sizeof(float));
        if (n_done_ < units_.size()) {
            n_done_ = units_.size() * 2;
            done_ = std::make_unique<std::atomic<int>[]>(n_done_);
            for (size_t i = 0; i < n_done_; i++) done_[i].store(0, std::memory_order_relaxed);
        }
    }

    int items() const { return int(items_.size()); }  // for Claims::open, in each layer
    int threads() const { return threads_; }
    const Item &item(int i) const { return items_[size_t(i)]; }
    const Unit &unit(const Item &item) const { return units_[size_t(item.unit)]; }
    float *records(const Unit &unit) const { return records_.as<float>() + unit.records; }
    // Whether this was the last of a unit's parts; the count is back at 0 then.
    bool finished(const Item &item) const {
        std::atomic<int> &done = done_[size_t(item.unit)];
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < unit(item).splits) return false;
        done.store(0, std::memory_order_relaxed);
        return true;
    }
    int64_t bytes() const {
        const size_t lists = units_.capacity() * sizeof(Unit) + items_.capacity() * sizeof(Item);
        return int64_t(records_.bytes() + lists + n_done_ * sizeof(int));
    }

    static int64_t stretches(int position) { return position / kStretch + 1; }

  private:
    std::vector<Unit> units_;
    std::vector<Item> items_;
    Buffer records_;
    std::unique_ptr<std::atomic<int>[]> done_;
    size_t n_done_ = 0;
    int threads_ = 1;
};

}  // namespace astrai::ASTRAI_ISA

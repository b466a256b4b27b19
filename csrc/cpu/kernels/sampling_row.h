// What one row asks for, done: once it is cut to candidates the vocabulary is not looked at again.
#pragma once

#include "sampling_logits.h"

namespace astrai::ASTRAI_ISA {

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

}  // namespace astrai::ASTRAI_ISA

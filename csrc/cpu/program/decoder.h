// The decoder as a program: embedding, layers, head, each a phase that all workers of the pool run together.
//
// T tokens in the step, S rows of logits, C hidden size, H query heads, K key/value heads, D head size, F width of the MLP.
// Between phases lies a barrier. With one or two rows every worker prepares all rows for itself instead of waiting for the
// others to do their share: it keeps a residual stream of its own, which all of them compute alike.
#pragma once

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.h"
#include "pool.h"
#include "program/program.h"

namespace astrai::ASTRAI_ISA {

class Decoder final : public Program {
  public:
    Decoder(const astrai_decoder &model, Pool &pool, int max_tokens, int max_logits)
        : model_(model), pool_(pool), C_(padded(model.hidden, kGroup)), attention_claims_(size_t(model.n_layers)),
          runs_(model.n_layers * kMatricesOfLayer + 1, pool.threads()) {
        const astrai_layer &first = model.layers[0];
        for (int i = 0; i < model.n_layers; i++) {
            const astrai_layer &layer = model.layers[i];
            if (layer.n_heads != first.n_heads || layer.n_kv_heads != first.n_kv_heads || layer.head_dim != first.head_dim) {
                throw std::invalid_argument("layer " + std::to_string(i) + " has other heads than layer 0");
            }
            widest_qkv_ = std::max(widest_qkv_, padded(layer.qkv.rows, kLanes));
            widest_q_ = std::max(widest_q_, padded(layer.n_heads * layer.head_dim, kGroup));
            widest_F_ = std::max(widest_F_, padded(layer.intermediate, kGroup));
            widest_D_ = std::max(widest_D_, layer.head_dim);
        }
        widest_input_ = std::max({C_, widest_q_, widest_F_});
        const size_t private_rows = Rows::bytes(kPrivateRows, widest_input_) + size_t(kPrivateRows) * C_ * 4;
        const size_t spread = Matmul::spread_bytes(widest_input_);
        const size_t attention = size_t(attention_scratch_floats(first.n_heads, first.n_kv_heads, widest_D_)) * 4;
        for (int worker = 0; worker < pool.threads(); worker++) {
            own_.push_back(std::make_unique<Own>());
            own_.back()->rows.reserve(private_rows);
            own_.back()->spread.reserve(spread);
            own_.back()->row.reserve(size_t(C_) * 4);
            own_.back()->attention.reserve(attention);
        }
        reserve(max_tokens, max_logits);
    }

    void run(const astrai_step &step) override {
        check(step);
        reserve(step.n_tokens, step.n_logits);
        step_ = &step;
        work_.prepare(step, model_.layers[0].n_heads, model_.layers[0].n_kv_heads, widest_D_, pool_.threads());
        open_claims();
        auto work = [this](int worker) { this->work(worker); };
        pool_.run(work);
    }

    int64_t bytes() const override {
        size_t total = hidden_.bytes() + tail_.bytes() + branch_.bytes() + qkv_.bytes() + attended_.bytes() + gates_.bytes() +
                       input_.bytes() + turns_.bytes() + size_t(work_.bytes());
        for (const auto &own : own_) total += own->rows.bytes() + own->spread.bytes() + own->row.bytes() + own->attention.bytes();
        return int64_t(total);
    }

    void profile(double *seconds) override {
        for (double &part : spent_) *seconds++ = part, part = 0;
    }

  private:
    enum Part { kEmbed, kQkv, kStore, kAttention, kO, kGateUp, kDown, kHead };
    enum Matrix { kOfQkv, kOfO, kOfGateUp, kOfDown, kMatricesOfLayer };
    static constexpr int kPrivateRows = 2;
    static constexpr int kUnit = 2;  // tiles that share a pass

    // What one worker has for itself.
    struct Own {
        Buffer rows;       // a residual stream and prepared rows, in the private mode
        Buffer spread;     // two unpacked tiles
        Buffer row;        // one row of C
        Buffer attention;  // scratch of the attention kernel
    };

    // The rows that a phase works on: their residual stream and their form as a matrix's input.
    struct Stage {
        int n_rows;
        bool is_private;
        float *hidden;
        void *input;
    };

    class Clock {
      public:
        Clock(double *spent, bool on) : spent_(spent), on_(on), last_(on ? now() : 0) {}
        void mark(Part part) {
            if (!on_) return;
            double t = now();
            spent_[part] += t - last_, last_ = t;
        }

      private:
        static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
        double *spent_;
        bool on_;
        double last_;
    };

    void check(const astrai_step &step) const {
        if (step.n_tokens < 1 || step.n_sequences < 1) throw std::invalid_argument("a step has at least one token of one sequence");
        for (int t = 0; t < step.n_tokens; t++) {
            if (step.token_ids[t] < 0 || step.token_ids[t] >= model_.vocab) {
                throw std::invalid_argument("token id " + std::to_string(step.token_ids[t]) + " is outside the vocabulary of " +
                                            std::to_string(model_.vocab));
            }
            if (step.positions[t] < 0) throw std::invalid_argument("a position is negative");
        }
        if (step.logits_stride < padded(model_.vocab, kLanes)) throw std::invalid_argument("logits_stride is too small");
    }

    void reserve(int T, int S) {
        hidden_.reserve(size_t(T) * C_ * 4);
        tail_.reserve(size_t(std::max(S, 1)) * C_ * 4);
        branch_.reserve(size_t(T) * C_ * 4);
        qkv_.reserve(size_t(T) * widest_qkv_ * 4);
        attended_.reserve(size_t(T) * widest_q_ * 4);
        gates_.reserve(size_t(T) * 2 * widest_F_ * 4);
        input_.reserve(Rows::bytes(T, widest_input_));
        turns_.reserve(size_t(T) * model_.n_ropes * widest_D_ * 4);
    }

    void open_claims() {
        for (int i = 0; i < model_.n_layers; i++) {
            const astrai_layer &layer = model_.layers[i];
            runs_.open(list_of(i, kOfQkv), Matmul::tiles(layer.qkv), kUnit);
            runs_.open(list_of(i, kOfO), Matmul::tiles(layer.o), kUnit);
            runs_.open(list_of(i, kOfGateUp), padded(layer.intermediate, kLanes) / kLanes, kUnit);
            runs_.open(list_of(i, kOfDown), Matmul::tiles(layer.down), kUnit);
            attention_claims_[size_t(i)].open(work_.items());
        }
        runs_.open(list_of_head(), Matmul::tiles(model_.head), kUnit);
    }

    int list_of(int layer, Matrix matrix) const { return layer * kMatricesOfLayer + matrix; }
    int list_of_head() const { return model_.n_layers * kMatricesOfLayer; }

    // The share of `n` things that one worker takes where all of them are equally long.
    std::pair<int, int> share(int n, int worker) const {
        const int64_t threads = pool_.threads();
        return {int(n * int64_t(worker) / threads), int(n * int64_t(worker + 1) / threads)};
    }

    Stage stage(int n_rows, Buffer &hidden, int worker) const {
        if (n_rows > kPrivateRows) return {n_rows, false, hidden.as<float>(), input_.as<void>()};
        float *own = own_[size_t(worker)]->rows.as<float>();
        return {n_rows, true, own, own + size_t(kPrivateRows) * C_};
    }

    std::pair<int, int> rows_of(const Stage &stage, int worker) const {
        return stage.is_private ? std::pair<int, int>{0, stage.n_rows} : share(stage.n_rows, worker);
    }

    void met(const Stage &stage) {
        if (!stage.is_private) pool_.barrier();
    }

    void work(int worker) {
        Clock clock(spent_, worker == 0);
        const astrai_step &step = *step_;
        Stage all = stage(step.n_tokens, hidden_, worker);
        embed(all, worker);
        prepare_turns(worker);
        clock.mark(kEmbed);
        for (int i = 0; i < model_.n_layers; i++) {
            const bool last = i == model_.n_layers - 1;
            const astrai_layer &layer = model_.layers[i];
            const float *post = i > 0 ? model_.layers[i - 1].post_mlp_norm : nullptr;
            Rows x = normed(all, layer.attn_norm, i > 0, post, layer.qkv.format, worker);
            multiply(layer.qkv, x, all.n_rows, layer.qkv_bias, qkv_.as<float>(), qkv_stride(layer), list_of(i, kOfQkv), worker);
            pool_.barrier();
            clock.mark(kQkv);
            const AttentionLayer attention = attention_of(i);
            store(layer, attention, worker);
            if (last && step.n_logits == 0) return;  // the keys and values were all that this step is for
            pool_.barrier();
            clock.mark(kStore);
            astrai::ASTRAI_ISA::attend(attention, step, work_, attention_claims_[size_t(i)], own_[size_t(worker)]->attention.as<float>(),
                                       qkv_.as<float>(), int64_t(qkv_stride(layer)), attended_.as<float>(),
                                       int64_t(attended_stride(layer)));
            pool_.barrier();
            clock.mark(kAttention);
            // Past the last attention only the rows that are sampled matter.
            const int32_t *chosen = last ? step.logit_rows : nullptr;
            if (last) all = chosen_rows(all, worker);
            x = attended(all, layer, chosen, worker);
            multiply(layer.o, x, all.n_rows, layer.o_bias, branch_.as<float>(), size_t(C_), list_of(i, kOfO), worker);
            pool_.barrier();
            clock.mark(kO);
            x = normed(all, layer.mlp_norm, true, layer.post_attn_norm, layer.gate_up.format, worker);
            gate_up(layer, x, all.n_rows, list_of(i, kOfGateUp), worker);
            pool_.barrier();
            clock.mark(kGateUp);
            x = gated(all, layer, worker);
            multiply(layer.down, x, all.n_rows, layer.down_bias, branch_.as<float>(), size_t(C_), list_of(i, kOfDown), worker);
            pool_.barrier();
            clock.mark(kDown);
        }
        const astrai_layer &last = model_.layers[model_.n_layers - 1];
        Rows x = normed(all, model_.final_norm, true, last.post_mlp_norm, model_.head.format, worker);
        multiply(model_.head, x, all.n_rows, nullptr, step.logits, size_t(step.logits_stride), list_of_head(), worker);
        clock.mark(kHead);
    }

    void embed(const Stage &stage, int worker) {
        auto [first, last] = rows_of(stage, worker);
        for (int r = first; r < last; r++) {
            float *row = stage.hidden + size_t(r) * C_;
            unpack_row(model_.embed, step_->token_ids[r], row);
            if (model_.embedding_scale != 1.0f) {
                for (int i = 0; i < model_.hidden; i++) row[i] *= model_.embedding_scale;
            }
        }
    }

    void prepare_turns(int worker) {
        const int T = step_->n_tokens;
        auto [first, last] = share(T * model_.n_ropes, worker);
        for (int i = first; i < last; i++) {
            const int rope = i / T, t = i % T;
            turn_of(step_->positions[t], model_.frequencies[rope], model_.rope_factors[rope], widest_D_, turn(rope, t));
        }
    }

    float *turn(int rope, int t) const { return turns_.as<float>() + (size_t(rope) * step_->n_tokens + t) * widest_D_; }

    // Adds the branch that was just computed to the residual stream, and norms it into a matrix's input.
    Rows normed(const Stage &stage, const float *weight, bool has_branch, const float *post_norm, int format, int worker) {
        Rows rows = Rows::at(stage.input, stage.n_rows, model_.hidden, format);
        float *scratch = own_[size_t(worker)]->row.as<float>();
        auto [first, last] = rows_of(stage, worker);
        for (int r = first; r < last; r++) {
            float *hidden = stage.hidden + size_t(r) * C_;
            if (has_branch) {
                const float *branch = branch_.as<float>() + size_t(r) * C_;
                if (post_norm) {
                    rms_norm(branch, post_norm, model_.hidden, model_.norm_eps, scratch);
                    branch = scratch;
                }
                add_row(hidden, branch, model_.hidden);
            }
            rms_norm(hidden, weight, model_.hidden, model_.norm_eps, scratch);
            prepare_row(rows, r, scratch, model_.hidden);
        }
        met(stage);
        return rows;
    }

    Rows attended(const Stage &stage, const astrai_layer &layer, const int32_t *chosen, int worker) {
        const int width = layer.n_heads * layer.head_dim;
        Rows rows = Rows::at(stage.input, stage.n_rows, width, layer.o.format);
        auto [first, last] = rows_of(stage, worker);
        for (int r = first; r < last; r++) {
            const int from = chosen ? chosen[r] : r;
            prepare_row(rows, r, attended_.as<float>() + size_t(from) * attended_stride(layer), width);
        }
        met(stage);
        return rows;
    }

    Rows gated(const Stage &stage, const astrai_layer &layer, int worker) {
        Rows rows = Rows::at(stage.input, stage.n_rows, layer.intermediate, layer.down.format);
        auto [first, last] = rows_of(stage, worker);
        for (int r = first; r < last; r++) {
            prepare_row(rows, r, gates_.as<float>() + size_t(r) * gates_stride(layer), layer.intermediate);
        }
        met(stage);
        return rows;
    }

    // The residual rows that logits are wanted of, moved together.
    Stage chosen_rows(const Stage &from, int worker) {
        Stage to = stage(step_->n_logits, tail_, worker);
        auto [first, last] = rows_of(to, worker);
        for (int r = first; r < last; r++) {  // ascending: where both are private, row r comes from r or from behind it
            const float *row = from.hidden + size_t(step_->logit_rows[r]) * C_;
            std::memmove(to.hidden + size_t(r) * C_, row, size_t(C_) * 4);
        }
        return to;
    }

    size_t qkv_stride(const astrai_layer &layer) const { return size_t(padded(layer.qkv.rows, kLanes)); }
    size_t attended_stride(const astrai_layer &layer) const { return size_t(padded(layer.n_heads * layer.head_dim, kGroup)); }
    size_t gates_stride(const astrai_layer &layer) const { return size_t(2) * padded(layer.intermediate, kLanes); }

    // Tiles that are taken together: few enough that nobody waits long for the last.
    int piece(int tiles) const { return std::clamp(tiles / (8 * pool_.threads()), kUnit, 32) / kUnit * kUnit; }

    void multiply(const astrai_matrix &matrix, const Rows &x, int n_rows, const float *bias, float *y, size_t y_stride,
                  int list, int worker) {
        const Matmul matmul(matrix, x, n_rows, bias, y, y_stride);
        const int size = piece(Matmul::tiles(matrix));
        while (auto run = runs_.take(list, worker, size)) matmul.run(run.first, run.last, own_[size_t(worker)]->spread.as<uint8_t>());
    }

    void gate_up(const astrai_layer &layer, const Rows &x, int n_rows, int list, int worker) {
        const int F = padded(layer.intermediate, kLanes), tiles = F / kLanes;
        const size_t stride = gates_stride(layer);
        float *gates = gates_.as<float>();
        const Matmul matmul(layer.gate_up, x, n_rows, layer.gate_up_bias, gates, stride);
        uint8_t *spread = own_[size_t(worker)]->spread.as<uint8_t>();
        const int size = std::min(piece(tiles), 16);
        while (auto run = runs_.take(list, worker, size)) {
            const auto [first, last] = run;
            matmul.run(first, last, spread);
            matmul.run(tiles + first, tiles + last, spread);
            for (int r = 0; r < n_rows; r++) {
                for (int i = first * kLanes; i < last * kLanes; i += kLanes) {
                    float *gate = gates + size_t(r) * stride + i;
                    F32 open = layer.activation == ASTRAI_SILU ? silu(load(gate)) : gelu_tanh(load(gate));
                    store_gate(gate, mul(open, load(gate + F)));
                }
            }
        }
    }

    static void store_gate(float *to, F32 x) { astrai::ASTRAI_ISA::store(to, x); }

    AttentionLayer attention_of(int i) const {
        const astrai_layer &layer = model_.layers[i];
        const astrai_kv &kv = step_->kv;
        return {layer.n_heads,     layer.n_kv_heads,
                layer.head_dim,    layer.window,
                layer.scale,       model_.kv_format,
                static_cast<uint8_t *>(kv.k) + i * kv.layer_stride, static_cast<uint8_t *>(kv.v) + i * kv.layer_stride};
    }

    // Norms and turns queries and keys, and puts keys and values where they belong. Split by (token, key/value head).
    void store(const astrai_layer &layer, const AttentionLayer &attention, int worker) {
        const int H = layer.n_heads, K = layer.n_kv_heads, D = layer.head_dim, group = H / K;
        const size_t stride = qkv_stride(layer);
        float *qkv = qkv_.as<float>();
        auto [first, last] = share(step_->n_tokens * K, worker);
        for (int i = first; i < last; i++) {
            const int t = i / K, k = i % K;
            float *token = qkv + size_t(t) * stride;
            const float *turns = turn(layer.rope, t);
            for (int h = k * group; h < (k + 1) * group; h++) {
                float *head = token + size_t(h) * D;
                if (layer.q_norm) rms_norm(head, layer.q_norm, D, model_.norm_eps, head);
                rotate(head, turns, D);
            }
            float *key = token + size_t(H + k) * D;
            if (layer.k_norm) rms_norm(key, layer.k_norm, D, model_.norm_eps, key);
            rotate(key, turns, D);
        }
        store_kv(attention, *step_, qkv + size_t(H) * D, qkv + size_t(H + K) * D, int64_t(stride), first, last);
    }

    const astrai_decoder &model_;
    Pool &pool_;
    const int C_;  // hidden size, padded
    int widest_qkv_ = 0, widest_q_ = 0, widest_F_ = 0, widest_D_ = 0, widest_input_ = 0;
    std::vector<Pool::Claims> attention_claims_;
    Pool::Runs runs_;  // a list for every matrix
    std::vector<std::unique_ptr<Own>> own_;
    Buffer hidden_, tail_, branch_, qkv_, attended_, gates_, input_, turns_;
    AttentionWork work_;
    const astrai_step *step_ = nullptr;
    double spent_[ASTRAI_PARTS] = {};
};

}  // namespace astrai::ASTRAI_ISA

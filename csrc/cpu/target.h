// The kernels of one instruction set and their table. Included once by each target_<isa>.cpp, which has defined ASTRAI_ISA
// and included its primitives.
#pragma once

#include "kernels.h"
#include "memory.h"

#include "kernels/activation.h"
#include "kernels/norm.h"
#include "kernels/rotary.h"
#include "kernels/rows.h"

#include "kernels/attention.h"
#include "kernels/matmul.h"
#include "kernels/pack.h"
#include "kernels/sampling.h"

#include "program/decoder.h"

namespace astrai::ASTRAI_ISA {

inline std::unique_ptr<Program> open_program(const astrai_decoder &model, Pool &pool, int max_tokens, int max_logits) {
    return std::make_unique<Decoder>(model, pool, max_tokens, max_logits);
}

inline void multiply(Pool &pool, const astrai_matrix &matrix, const float *x, int n_rows, const float *bias, float *y,
                     size_t y_stride) {
    Buffer memory;
    memory.reserve(Rows::bytes(n_rows, matrix.cols));
    const Rows rows = Rows::at(memory.as<void>(), n_rows, matrix.cols, matrix.format);
    const Matmul matmul(matrix, rows, n_rows, bias, y, y_stride);
    std::vector<Buffer> spread(size_t(pool.threads()));
    for (Buffer &each : spread) each.reserve(Matmul::spread_bytes(matrix.cols));
    Pool::Claims claims;
    claims.open(Matmul::tiles(matrix));
    auto work = [&](int worker) {
        for (int r = worker; r < n_rows; r += pool.threads()) prepare_row(rows, r, x + size_t(r) * matrix.cols, matrix.cols);
        pool.barrier();
        constexpr int kPiece = 8;
        for (int first; (first = claims.take(kPiece)) >= 0;) {
            matmul.run(first, claims.last(first, kPiece), spread[size_t(worker)].as<uint8_t>());
        }
    };
    pool.run(work);
}

inline void attend_once(Pool &pool, const astrai_layer &layer, int kv_format, int index, const astrai_step &step, const float *q,
                        const float *k, const float *v, float *out) {
    const int H = layer.n_heads, K = layer.n_kv_heads, D = layer.head_dim;
    const AttentionLayer attention{H,         K,       D,
                                   layer.window, layer.scale, kv_format,
                                   static_cast<uint8_t *>(step.kv.k) + index * step.kv.layer_stride,
                                   static_cast<uint8_t *>(step.kv.v) + index * step.kv.layer_stride};
    AttentionWork items;
    items.prepare(step, H, K, D, pool.threads());
    std::vector<Buffer> scratch(size_t(pool.threads()));
    for (Buffer &each : scratch) each.reserve(size_t(attention_scratch_floats(H, K, D)) * 4);
    Pool::Claims claims;
    claims.open(items.items());
    auto work = [&](int worker) {
        const int64_t pairs = int64_t(step.n_tokens) * K, threads = pool.threads();
        store_kv(attention, step, k, v, int64_t(K) * D, int(pairs * worker / threads), int(pairs * (worker + 1) / threads));
        pool.barrier();
        attend(attention, step, items, claims, scratch[size_t(worker)].as<float>(), q, int64_t(H) * D, out, int64_t(H) * D);
    };
    pool.run(work);
}

inline std::unique_ptr<Sampler> open_sampler(Pool &pool, int vocab) { return std::make_unique<PooledSampler>(pool, vocab); }

constexpr Kernels table(const char *name) {
    return {name, pack_rows, open_program, multiply, attend_once, rms_norm, open_sampler};
}

}  // namespace astrai::ASTRAI_ISA

// What one instruction set offers: a table of functions, filled in by its target_<isa>.cpp.
#pragma once

#include <memory>

#include "include/astrai_cpu.h"
#include "pool.h"
#include "program/program.h"
#include "sampler.h"

namespace astrai {

struct Kernels {
    const char *name;
    void (*pack_rows)(const astrai_matrix &, int from, const void *source, int64_t row_bytes, int first_row, int n_rows);
    std::unique_ptr<Program> (*program)(const astrai_decoder &, Pool &, int max_tokens, int max_logits);
    void (*matmul)(Pool &, const astrai_matrix &, const float *x, int rows, const float *bias, float *y, size_t y_stride);
    void (*attention)(Pool &, const astrai_layer &, int kv_format, int layer_index, const astrai_step &, const float *q,
                      const float *k, const float *v, float *out);
    void (*rms_norm)(const float *x, const float *weight, int n, float eps, float *out);
    std::unique_ptr<Sampler> (*sampler)(Pool &, int vocab);
};

// Constants: no instruction of a file that was compiled for a better CPU runs before library.cpp has asked this CPU.
extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace astrai

// The C interface: finds the table of an instruction set, turns exceptions into sentences, owns nothing but what it hands out.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "include/astrai_cpu.h"
#include "kernels.h"
#include "kernels/pack.h"
#include "memory.h"
#include "pool.h"

namespace {

thread_local std::string last_error;

struct Target {
    const astrai::Kernels &kernels;
    bool (*runs_here)();
};

// Best first. This file is compiled for every CPU, so the questions are asked here.
const Target all_targets[] = {
#if defined(__x86_64__)
    {astrai::avx512_kernels,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
                __builtin_cpu_supports("avx512bf16");
     }},
    {astrai::avx2_kernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
#endif
    {astrai::portable_kernels, [] { return true; }},
};

std::string names(bool only_here) {
    std::string joined;
    for (const Target &target : all_targets) {
        if (!only_here || target.runs_here()) joined += (joined.empty() ? "" : " ") + std::string(target.kernels.name);
    }
    return joined;
}

const astrai::Kernels &best_kernels() {
    const Target *target = all_targets;
    while (!target->runs_here()) target++;
    return target->kernels;
}

const astrai::Kernels &kernels_of(const char *isa) {
    for (const Target &target : all_targets) {
        if (std::string(target.kernels.name) != isa) continue;
        if (target.runs_here()) return target.kernels;
        throw std::invalid_argument(std::string("this CPU lacks what '") + isa + "' needs; it runs: " + names(true));
    }
    throw std::invalid_argument(std::string("there is no instruction set '") + isa + "'; there are: " + names(false));
}

// Runs `body`; what it throws becomes the error of this thread and `failed`.
template <class Result, class Body> Result guarded(Result failed, Body body) noexcept {
    try {
        last_error.clear();
        return body();
    } catch (const std::exception &error) {
        last_error = error.what();
    } catch (...) {
        last_error = "an unknown exception";
    }
    return failed;
}

template <class Body> int32_t checked(Body body) noexcept {
    return guarded<int32_t>(1, [&] { return body(), 0; });
}

}  // namespace

struct astrai_pool {
    astrai::Pool pool;
};

struct astrai_program {
    std::unique_ptr<astrai::Program> program;
};

struct astrai_sampler {
    std::unique_ptr<astrai::Sampler> sampler;
};

extern "C" {

const char *astrai_error(void) { return last_error.c_str(); }

int32_t astrai_abi(void) { return ASTRAI_CPU_ABI; }

const char *astrai_built_for(void) {
    static const std::string joined = names(false);
    return joined.c_str();
}

const char *astrai_runs_here(void) {
    static const std::string joined = names(true);
    return joined.c_str();
}

astrai_pool *astrai_pool_open(int32_t threads, int32_t spin_us) {
    return guarded<astrai_pool *>(nullptr, [&] { return new astrai_pool{{threads, spin_us}}; });
}

void astrai_pool_close(astrai_pool *pool) { delete pool; }

void *astrai_allocate(int64_t bytes) {
    return guarded<void *>(nullptr, [&] { return astrai::allocate(size_t(bytes)); });
}

void astrai_free(void *memory, int64_t bytes) { astrai::release(memory, size_t(bytes)); }

int32_t astrai_pack(astrai_pool *pool, const astrai_matrix *matrix, int32_t from, const void *source, int64_t row_bytes,
                    int32_t first_row, int32_t n_rows) {
    return checked([&] {
        if (first_row < 0 || n_rows < 0 || first_row + n_rows > (matrix->rows + 15) / 16 * 16) {
            throw std::invalid_argument("the rows to pack are outside the matrix");
        }
        astrai::check_source(*matrix, from, row_bytes);
        const astrai::Kernels &best = best_kernels();  // they all pack the same
        constexpr int kPiece = 64;
        astrai::Pool::Claims claims;
        claims.open(n_rows);
        auto work = [&](int) {
            for (int first; (first = claims.take(kPiece)) >= 0;) {
                const auto *rows = static_cast<const uint8_t *>(source) + first * row_bytes;
                best.pack_rows(*matrix, from, rows, row_bytes, first_row + first, claims.last(first, kPiece) - first);
            }
        };
        pool->pool.run(work);
    });
}

int32_t astrai_unpack(const astrai_matrix *matrix, const int32_t *rows, int32_t n, float *out) {
    return checked([&] {
        for (int32_t i = 0; i < n; i++) {
            if (rows[i] < 0 || rows[i] >= matrix->rows) throw std::invalid_argument("a row to unpack is outside the matrix");
            astrai::unpack_row(*matrix, rows[i], out + size_t(i) * size_t(matrix->cols));
        }
    });
}

astrai_program *astrai_program_open(const char *isa, const astrai_decoder *decoder, astrai_pool *pool, int32_t max_tokens,
                                    int32_t max_logits) {
    return guarded<astrai_program *>(nullptr, [&] {
        return new astrai_program{kernels_of(isa).program(*decoder, pool->pool, max_tokens, max_logits)};
    });
}

void astrai_program_close(astrai_program *program) { delete program; }

int32_t astrai_program_run(astrai_program *program, const astrai_step *step) {
    return checked([&] { program->program->run(*step); });
}

int64_t astrai_program_bytes(const astrai_program *program) { return program->program->bytes(); }

void astrai_program_profile(astrai_program *program, double *seconds) { program->program->profile(seconds); }

int32_t astrai_matmul(const char *isa, astrai_pool *pool, const astrai_matrix *matrix, const float *x, int32_t rows,
                      const float *bias, float *y, int64_t y_stride) {
    return checked([&] { kernels_of(isa).matmul(pool->pool, *matrix, x, rows, bias, y, size_t(y_stride)); });
}

int32_t astrai_attention(const char *isa, astrai_pool *pool, const astrai_layer *layer, int32_t kv_format, int32_t layer_index,
                         const astrai_step *step, const float *q, const float *k, const float *v, float *out) {
    return checked([&] { kernels_of(isa).attention(pool->pool, *layer, kv_format, layer_index, *step, q, k, v, out); });
}

int32_t astrai_rms_norm(const char *isa, const float *x, const float *weight, int32_t rows, int32_t cols, float eps, float *out) {
    return checked([&] {
        for (int32_t r = 0; r < rows; r++) kernels_of(isa).rms_norm(x + size_t(r) * cols, weight, cols, eps, out + size_t(r) * cols);
    });
}

astrai_sampler *astrai_sampler_open(const char *isa, astrai_pool *pool, int32_t vocab) {
    return guarded<astrai_sampler *>(nullptr, [&] {
        if (vocab < 1) throw std::invalid_argument("a vocabulary has at least one token");
        return new astrai_sampler{kernels_of(isa).sampler(pool->pool, vocab)};
    });
}

void astrai_sampler_close(astrai_sampler *sampler) { delete sampler; }

int32_t astrai_sampler_choose(astrai_sampler *sampler, astrai_choice *rows, int32_t n) {
    return checked([&] { sampler->sampler->choose(rows, n); });
}

int32_t astrai_sampler_likeliest(astrai_sampler *sampler, const float *logits, int32_t k, int32_t *ids, float *values,
                                 double *log_sum) {
    return checked([&] { *log_sum = sampler->sampler->likeliest(logits, k, ids, values); });
}

}  // extern "C"

// What the C interface sees of sampling; kernels/sampling.h has it for each instruction set.
#pragma once

#include "include/astrai_cpu.h"

namespace astrai {

class Sampler {
  public:
    virtual ~Sampler() = default;
    virtual void choose(astrai_choice *rows, int n) = 0;
    // Returns the logarithm of the sum of exponentials; NaN, and nothing else, for a row with NaN or +infinity.
    virtual double likeliest(const float *logits, int k, int32_t *ids, float *values) = 0;
};

}  // namespace astrai

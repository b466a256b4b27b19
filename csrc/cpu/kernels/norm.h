// RMSNorm (Zhang and Sennrich, arXiv:1910.07467), in float32 and in one order of sums.
#pragma once

#include <cmath>

namespace astrai::ASTRAI_ISA {

// out = x / sqrt(mean(x^2) + eps) * weight, over n numbers. `out` may be x.
inline void rms_norm(const float *x, const float *weight, int n, float eps, float *out) {
    F32 squares[2] = {zero(), zero()};
    int whole = n / kLanes * kLanes;
    for (int i = 0; i < whole; i += kLanes) {
        F32 v = load(x + i);
        squares[i / kLanes & 1] = fma(v, v, squares[i / kLanes & 1]);
    }
    if (whole < n) {
        F32 v = load_first(x + whole, n - whole);
        squares[0] = fma(v, v, squares[0]);
    }
    F32 factor = set1(1.0f / std::sqrt(sum(add(squares[0], squares[1])) / float(n) + eps));
    for (int i = 0; i < whole; i += kLanes) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
    if (whole < n) {
        F32 v = mul(mul(load_first(x + whole, n - whole), factor), load_first(weight + whole, n - whole));
        store_first(out + whole, v, n - whole);
    }
}

// sum += x
inline void add_row(float *total, const float *x, int n) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(total + i, add(load(total + i), load(x + i)));
    if (i < n) store_first(total + i, add(load_first(total + i, n - i), load_first(x + i, n - i)), n - i);
}

}  // namespace astrai::ASTRAI_ISA

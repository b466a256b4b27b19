// exp, and the gates of the MLP that are made of it.
#pragma once

namespace astrai::ASTRAI_ISA {

// e^x within 2 units in the last place for -87 <= x <= 88; beyond, the value at the border. NaN stays NaN.
// Cody-Waite reduction to |r| <= ln(2) / 2 and the Taylor polynomial of degree 7.
inline F32 exp(F32 x) {
    x = min(set1(88.0f), max(set1(-87.0f), x));  // both return their second argument when it is NaN
    F32 n = round(mul(x, set1(1.44269504089f)));
    F32 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F32 p = set1(1.0f / 5040);
    for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, set1(coefficient));
    return times_power_of_two(p, n);
}

inline F32 silu(F32 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// x / 2 * (1 + tanh(u)) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). Hendrycks and Gimpel, arXiv:1606.08415.
inline F32 gelu_tanh(F32 x) {
    F32 u = mul(x, fma(mul(x, x), set1(0.044715f), set1(1.0f)));
    return div(x, add(set1(1.0f), exp(mul(u, set1(-1.5957691216f)))));
}

}  // namespace astrai::ASTRAI_ISA

// Rotary position embedding in halves (GPT-NeoX order; Su et al., arXiv:2104.09864): feature i turns with feature i + D / 2.
#pragma once

#include <cmath>

namespace astrai::ASTRAI_ISA {

// D numbers: cosines of the D / 2 angles, then sines. The angle is a float32 product, as torch computes it.
inline void turn_of(int position, const float *frequencies, float factor, int head_dim, float *turn) {
    int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float angle = float(position) * frequencies[i];
        turn[i] = std::cos(angle) * factor;
        turn[half + i] = std::sin(angle) * factor;
    }
}

// One head in place. Products are rounded before they are added, as in the reference.
inline void rotate(float *head, const float *turn, int head_dim) {
    int half = head_dim / 2, i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        F32 cosine = load(turn + i), sine = load(turn + half + i), a = load(head + i), b = load(head + half + i);
        store(head + i, sub(mul(a, cosine), mul(b, sine)));
        store(head + half + i, add(mul(b, cosine), mul(a, sine)));
    }
    for (; i < half; i++) {  // head_dim 16, 48, 80: half is no multiple of 16
        float cosine = turn[i], sine = turn[half + i], a = head[i], b = head[half + i];
        head[i] = a * cosine - b * sine;
        head[half + i] = b * cosine + a * sine;
    }
}

}  // namespace astrai::ASTRAI_ISA

// Primitives in plain C++ with GCC's and Clang's vector types: SSE2 on any x86-64, NEON on ARM, whatever else there is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace astrai::ASTRAI_ISA {

constexpr int kLanes = 16;
constexpr int kWeightBias = 0;
constexpr int kRowsOfOneTile = 2;
constexpr int kRowsOfTwoTiles = 1;
constexpr int kFloatTiles = 2;
constexpr int kAttentionRows = 2;
constexpr int kAttentionSums = 2;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

struct F32 { Floats v; };
struct I32 { Ints v; };
struct Bytes { uint8_t v[64]; };
struct Pairs { Words v; };

inline F32 zero() { return {Floats{}}; }
inline F32 set1(float x) { return {Floats{} + x}; }
inline F32 load(const float *p) {
    F32 x;
    std::memcpy(&x, p, 64);
    return x;
}
inline F32 load_first(const float *p, int n) {
    F32 x = zero();
    std::memcpy(&x, p, (size_t)n * 4);
    return x;
}
inline void store(float *p, F32 x) { std::memcpy(p, &x, 64); }
inline void store_first(float *p, F32 x, int n) { std::memcpy(p, &x, (size_t)n * 4); }
inline F32 add(F32 a, F32 b) { return {a.v + b.v}; }
inline F32 sub(F32 a, F32 b) { return {a.v - b.v}; }
inline F32 mul(F32 a, F32 b) { return {a.v * b.v}; }
inline F32 div(F32 a, F32 b) { return {a.v / b.v}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }
inline F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
inline F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
// Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even, below 2^22.
inline F32 round(F32 a) {
    Floats shift = Floats{} + 12582912.0f;
    return {(a.v + shift) - shift};
}
inline I32 to_int(F32 a) { return {__builtin_convertvector(round(a).v, Ints)}; }
inline F32 to_float(I32 a) { return {__builtin_convertvector(a.v, Floats)}; }
inline F32 times_power_of_two(F32 a, F32 n) {
    Ints bits = (to_int(n).v + 127) << 23;
    Floats power;
    std::memcpy(&power, &bits, 64);
    return {a.v * power};
}
inline I32 counting() { return {Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}; }
inline F32 keep_first(F32 x, int n, F32 other) { return {counting().v < n ? x.v : other.v}; }
inline F32 keep_from(F32 x, int n, F32 other) { return keep_first(other, n, x); }
inline float sum(F32 x) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += x.v[i];
    return total;
}
inline float largest(F32 x) {
    float most = x.v[0];
    for (int i = 1; i < 16; i++) most = x.v[i] > most ? x.v[i] : most;
    return most;
}

inline float float16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, word;
    float x;
    if (rest >= 0x7c00) {
        word = sign | 0x7f800000u | (rest & 0x3ff) << 13;
        std::memcpy(&x, &word, 4);
        return x;
    }
    word = rest << 13;
    std::memcpy(&x, &word, 4);
    x *= 5.192296858534828e33f;  // 2^112: the difference of the exponents' biases; makes denormal numbers normal too
    std::memcpy(&word, &x, 4);
    word |= sign;
    std::memcpy(&x, &word, 4);
    return x;
}
inline F32 load_float16(const uint16_t *p) {
    F32 x;
    for (int i = 0; i < 16; i++) x.v[i] = float16(p[i]);
    return x;
}
inline F32 load_bfloat16(const uint16_t *p) {
    Words bits;
    for (int i = 0; i < 16; i++) bits[i] = (uint32_t)p[i] << 16;
    F32 x;
    std::memcpy(&x, &bits, 64);
    return x;
}
inline void store_bfloat16(uint16_t *p, F32 x) {
    for (int i = 0; i < 16; i++) {
        float one = x.v[i];
        uint32_t bits;
        std::memcpy(&bits, &one, 4);
        p[i] = one != one ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

inline I32 zero_int() { return {Ints{}}; }
inline I32 set1_int(int32_t x) { return {Ints{} + x}; }
inline I32 add(I32 a, I32 b) { return {a.v + b.v}; }
inline I32 load_int(const int32_t *p) {
    I32 x;
    std::memcpy(&x, p, 64);
    return x;
}
inline void store_int(int32_t *p, I32 x) { std::memcpy(p, &x, 64); }
inline int32_t sum(I32 x) {
    int32_t total = 0;
    for (int i = 0; i < 16; i++) total += x.v[i];
    return total;
}
inline void store_int8(int8_t *p, I32 x) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)x.v[i];
}
inline I32 max_magnitude(I32 so_far, F32 x) {
    Ints bits;
    std::memcpy(&bits, &x, 64);
    bits &= 0x7fffffff;
    return {so_far.v > bits ? so_far.v : bits};
}
inline int32_t largest(I32 x) {
    int32_t most = x.v[0];
    for (int i = 1; i < 16; i++) most = x.v[i] > most ? x.v[i] : most;
    return most;
}
inline uint32_t greater(F32 a, F32 b) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= (uint32_t)(a.v[i] > b.v[i]) << i;
    return bits;
}
inline uint32_t equal(I32 a, I32 b) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= (uint32_t)(a.v[i] == b.v[i]) << i;
    return bits;
}

inline Bytes load_bytes(const uint8_t *p) {
    Bytes x;
    std::memcpy(&x, p, 64);
    return x;
}
inline void store_bytes(uint8_t *p, Bytes x) { std::memcpy(p, &x, 64); }
inline Bytes low_nibbles(Bytes x) {
    for (uint8_t &byte : x.v) byte &= 15;
    return x;
}
inline Bytes high_nibbles(Bytes x) {
    for (uint8_t &byte : x.v) byte >>= 4;
    return x;
}
namespace detail {
inline I32 dot(I32 sum, const Bytes &codes, int32_t four, int bias) {
    int8_t activations[4];
    std::memcpy(activations, &four, 4);
    for (int i = 0; i < 16; i++) {
        int32_t total = 0;
        for (int k = 0; k < 4; k++) total += ((int)codes.v[4 * i + k] - bias) * activations[k];
        sum.v[i] += total;
    }
    return sum;
}
}  // namespace detail
inline I32 dot_bytes(I32 sum, const Bytes &codes, int32_t four) { return detail::dot(sum, codes, four, 128); }
inline I32 dot_nibbles(I32 sum, const Bytes &codes, int32_t four) { return detail::dot(sum, codes, four, 0); }

inline Pairs load_pairs(const uint16_t *p) {
    Pairs x;
    std::memcpy(&x, p, 64);
    return x;
}
inline F32 dot_pairs(F32 sum, Pairs x, uint32_t two) {
    Words low = x.v << 16, high = x.v & 0xffff0000u;
    uint32_t first_bits = two << 16, second_bits = two & 0xffff0000u;
    Floats a, b;
    float first, second;
    std::memcpy(&a, &low, 64), std::memcpy(&b, &high, 64);
    std::memcpy(&first, &first_bits, 4), std::memcpy(&second, &second_bits, 4);
    return {(sum.v + a * first) + b * second};
}
inline Pairs first_of_pairs(Pairs x) { return {x.v & 0xffffu}; }
inline Pairs second_of_pairs(Pairs x) { return {x.v & 0xffff0000u}; }

inline void prefetch(const void *p) { __builtin_prefetch(p); }

}  // namespace astrai::ASTRAI_ISA

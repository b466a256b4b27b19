// Primitives on AVX2 with FMA and F16C (Intel Haswell, AMD Zen and later): 16 lanes of 32 bits in two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace astrai::ASTRAI_ISA {

constexpr int kLanes = 16;
constexpr int kWeightBias = 0;  // dot_bytes takes the bias off its codes, because it needs signed ones
constexpr int kRowsOfOneTile = 3;
constexpr int kRowsOfTwoTiles = 1;
constexpr int kFloatTiles = 3;
constexpr int kAttentionRows = 4;
constexpr int kAttentionSums = 4;

struct F32 { __m256 a, b; };
struct I32 { __m256i a, b; };
struct Bytes { __m256i a, b; };
struct Pairs { __m256i a, b; };

namespace detail {
// Lanes below n have all bits set.
inline __m256i first(int n, int from) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - from), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline float sum(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline __m256i dot(__m256i codes, __m256i four) {  // codes signed: |code| <= 128 and |activation| <= 127 stay below 2^15 in pairs
    __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(four, codes));
    return _mm256_madd_epi16(products, _mm256_set1_epi16(1));
}
inline __m256i round_to_bfloat16(__m256 x) {  // to nearest even, in the low halves; NaN stays NaN
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), nan);
}
}  // namespace detail

inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32 load_first(const float *p, int n) {
    return {_mm256_maskload_ps(p, detail::first(n, 0)), _mm256_maskload_ps(p + 8, detail::first(n, 8))};
}
inline void store(float *p, F32 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline void store_first(float *p, F32 x, int n) {
    _mm256_maskstore_ps(p, detail::first(n, 0), x.a), _mm256_maskstore_ps(p + 8, detail::first(n, 8), x.b);
}
inline F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F32 round(F32 x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
inline F32 times_power_of_two(F32 x, F32 n) {
    auto power = [](__m256 exponent) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23));
    };
    return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
}
inline F32 keep_first(F32 x, int n, F32 other) {
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(detail::first(n, 0))),
            _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(detail::first(n, 8)))};
}
inline F32 keep_from(F32 x, int n, F32 other) { return keep_first(other, n, x); }
inline float sum(F32 x) { return detail::sum(_mm256_add_ps(x.a, x.b)); }
inline float largest(F32 x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

inline F32 load_float16(const uint16_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
inline F32 load_bfloat16(const uint16_t *p) {
    auto half = [](const uint16_t *q) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)q)), 16));
    };
    return {half(p), half(p + 8)};
}
inline void store_bfloat16(uint16_t *p, F32 x) {
    __m256i packed = _mm256_packus_epi32(detail::round_to_bfloat16(x.a), detail::round_to_bfloat16(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

inline I32 zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32 set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 add(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I32 load_int(const int32_t *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
inline void store_int(int32_t *p, I32 x) {
    _mm256_storeu_si256((__m256i *)p, x.a), _mm256_storeu_si256((__m256i *)(p + 8), x.b);
}
inline int32_t sum(I32 x) {
    int32_t lanes[16], total = 0;
    store_int(lanes, x);
    for (int32_t lane : lanes) total += lane;
    return total;
}
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I32 to_int(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store_int8(int8_t *p, I32 x) {
    int32_t lanes[16];
    store_int(lanes, x);
    for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}
inline I32 max_magnitude(I32 so_far, F32 x) {
    __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_max_epi32(so_far.a, _mm256_and_si256(_mm256_castps_si256(x.a), mask)),
            _mm256_max_epi32(so_far.b, _mm256_and_si256(_mm256_castps_si256(x.b), mask))};
}
inline int32_t largest(I32 x) {
    int32_t lanes[8];
    _mm256_storeu_si256((__m256i *)lanes, _mm256_max_epi32(x.a, x.b));
    int32_t most = lanes[0];
    for (int32_t lane : lanes) most = lane > most ? lane : most;
    return most;
}
inline uint32_t greater(F32 x, F32 y) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)) |
           (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)) << 8;
}
inline uint32_t equal(I32 x, I32 y) {
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a))) |
           (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b))) << 8;
}
inline I32 counting() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

inline Bytes load_bytes(const uint8_t *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
inline void store_bytes(uint8_t *p, Bytes x) {
    _mm256_storeu_si256((__m256i *)p, x.a), _mm256_storeu_si256((__m256i *)(p + 32), x.b);
}
inline Bytes low_nibbles(Bytes x) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes high_nibbles(Bytes x) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
inline I32 dot_bytes(I32 sum, Bytes codes, int32_t four) {
    __m256i bias = _mm256_set1_epi8((char)0x80), x = _mm256_set1_epi32(four);
    return {_mm256_add_epi32(sum.a, detail::dot(_mm256_xor_si256(codes.a, bias), x)),
            _mm256_add_epi32(sum.b, detail::dot(_mm256_xor_si256(codes.b, bias), x))};
}
inline I32 dot_nibbles(I32 sum, Bytes codes, int32_t four) {
    __m256i x = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.a, x), ones)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.b, x), ones))};
}

inline Pairs load_pairs(const uint16_t *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 16))};
}
inline F32 dot_pairs(F32 sum, Pairs x, uint32_t two) {
    __m256 first = _mm256_castsi256_ps(_mm256_set1_epi32((int32_t)(two << 16)));
    __m256 second = _mm256_castsi256_ps(_mm256_set1_epi32((int32_t)(two & 0xffff0000u)));
    __m256i high = _mm256_set1_epi32((int32_t)0xffff0000u);
    auto one = [&](__m256 so_far, __m256i pairs) {
        so_far = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), first, so_far);
        return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(pairs, high)), second, so_far);
    };
    return {one(sum.a, x.a), one(sum.b, x.b)};
}
inline Pairs first_of_pairs(Pairs x) {
    __m256i low = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
inline Pairs second_of_pairs(Pairs x) {
    __m256i high = _mm256_set1_epi32((int32_t)0xffff0000u);
    return {_mm256_and_si256(x.a, high), _mm256_and_si256(x.b, high)};
}

inline void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

}  // namespace astrai::ASTRAI_ISA

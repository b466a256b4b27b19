// Primitives on AVX-512 with VNNI and BF16 (Intel Sapphire Rapids, AMD Zen 4 and later): 16 lanes of 32 bits in one register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace astrai::ASTRAI_ISA {

constexpr int kLanes = 16;
constexpr int kWeightBias = 128;  // what dot_bytes leaves in its sum for each activation: codes are unsigned here
constexpr int kRowsOfOneTile = 6;   // rows that one pass of a kernel over one tile keeps in registers
constexpr int kRowsOfTwoTiles = 6;  // and over two tiles side by side
constexpr int kFloatTiles = 4;      // tiles side by side for float weights and one row
constexpr int kAttentionRows = 8;   // rows that attention takes at a time
constexpr int kAttentionSums = 28;  // registers that it sums in

struct F32 { __m512 v; };
struct I32 { __m512i v; };
struct Bytes { __m512i v; };   // 16 lanes of 4 bytes
struct Pairs { __m512bh v; };  // 16 lanes of 2 bfloat16

inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32 load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline F32 load_first(const float *p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
inline void store(float *p, F32 x) { _mm512_storeu_ps(p, x.v); }
inline void store_first(float *p, F32 x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x.v); }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }                // b where one is NaN
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 times_power_of_two(F32 a, F32 n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // n whole, -126..127
// Lanes 0..n-1 (n.. 15) of x, `other` elsewhere.
inline F32 keep_first(F32 x, int n, F32 other) { return {_mm512_mask_mov_ps(other.v, __mmask16((1u << n) - 1), x.v)}; }
inline F32 keep_from(F32 x, int n, F32 other) { return {_mm512_mask_mov_ps(x.v, __mmask16((1u << n) - 1), other.v)}; }
inline float sum(F32 a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F32 a) { return _mm512_reduce_max_ps(a.v); }

inline F32 load_float16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
inline F32 load_bfloat16(const uint16_t *p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
inline void store_bfloat16(uint16_t *p, F32 x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x.v)); }

inline I32 zero_int() { return {_mm512_setzero_si512()}; }
inline I32 set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32 load_int(const int32_t *p) { return {_mm512_loadu_si512(p)}; }
inline void store_int(int32_t *p, I32 x) { _mm512_storeu_si512(p, x.v); }
inline int32_t sum(I32 a) { return _mm512_reduce_add_epi32(a.v); }
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline void store_int8(int8_t *p, I32 x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x.v)); }
// The larger magnitude as bits: NaN is above infinity and infinity above every number, so that neither is lost.
inline I32 max_magnitude(I32 so_far, F32 x) {
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
    return {_mm512_max_epi32(so_far.v, bits)};
}
inline int32_t largest(I32 a) { return _mm512_reduce_max_epi32(a.v); }
// One bit a lane: a > b.
inline uint32_t greater(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline uint32_t equal(I32 a, I32 b) { return _mm512_cmpeq_epi32_mask(a.v, b.v); }
inline I32 counting() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

inline Bytes load_bytes(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t *p, Bytes x) { _mm512_storeu_si512(p, x.v); }
inline Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
// sum + for each lane the dot product of its 4 codes (weight + 128) with 4 activations: too large by kWeightBias * their sum.
inline I32 dot_bytes(I32 sum, Bytes codes, int32_t four) { return {_mm512_dpbusd_epi32(sum.v, codes.v, _mm512_set1_epi32(four))}; }
// The same for codes 0..15, with nothing left over.
inline I32 dot_nibbles(I32 sum, Bytes codes, int32_t four) { return dot_bytes(sum, codes, four); }

inline Pairs load_pairs(const uint16_t *p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
// sum + for each lane the dot product of its 2 bfloat16 with the two of `two` (the first in the low half).
inline F32 dot_pairs(F32 sum, Pairs x, uint32_t two) { return {_mm512_dpbf16_ps(sum.v, x.v, (__m512bh)_mm512_set1_epi32((int32_t)two))}; }
// The first of each pair kept, the second made zero.
inline Pairs first_of_pairs(Pairs x) { return {(__m512bh)_mm512_and_si512((__m512i)x.v, _mm512_set1_epi32(0xffff))}; }
inline Pairs second_of_pairs(Pairs x) { return {(__m512bh)_mm512_and_si512((__m512i)x.v, _mm512_set1_epi32((int32_t)0xffff0000u))}; }

inline void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

}  // namespace astrai::ASTRAI_ISA

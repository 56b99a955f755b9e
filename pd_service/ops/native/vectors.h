/* What the kernels share: 16 values at a time, loaded from float32 or bfloat16 and computed in float32. */
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum kind { FLOAT32 = 0, BFLOAT16 = 1 }; /* of an array's elements */
enum { LANES = 16 };

INLINE int64_t size_of(int kind) { return kind == FLOAT32 ? 4 : 2; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

/* Threads that pay for `work` elements: waking one up costs about as much as 16,384 of them. */
INLINE int threads_for(int64_t work, int threads) { return work < 32768 ? 1 : threads; }

INLINE __m512 load(const void *base, int64_t index, int kind)
{
    if (kind == FLOAT32)
        return _mm512_loadu_ps((const float *)base + index);
    __m256i halves = _mm256_loadu_si256((const void *)((const uint16_t *)base + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* bfloat16 rounds to the nearest, ties to even; written out, because the instruction for it is not in every AVX-512. */
INLINE void store(void *base, int64_t index, __m512 value, int kind)
{
    if (kind == FLOAT32) {
        _mm512_storeu_ps((float *)base + index, value);
        return;
    }
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((void *)((uint16_t *)base + index), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

/* e^x, to 1 unit in the last place or so (polynomial of Cephes' expf); 0 below e^-87, e^88 above that, NaN for NaN. */
INLINE __m512 exponential(__m512 x)
{
    const __m512 low = _mm512_set1_ps(-87.0f);
    __mmask16 is_alive = _mm512_cmp_ps_mask(x, low, _CMP_NLE_UQ);
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(low, x)); /* in this order a NaN stays */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(is_alive, p, n);
}

INLINE __m512 silu_times(__m512 gate, __m512 up)
{
    __m512 decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), decay)), up);
}

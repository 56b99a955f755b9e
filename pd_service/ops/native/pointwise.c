/* What stands between the matrix products: norm, rotation, activation, writing the cache. Rows never meet. */
#include <math.h>
#include <string.h>

#include "vectors.h"

/* out[i][j] = x[i][j] / rms(x[i][j]) * weight; x [outer, inner, dim] with any strides (elements), out contiguous. */
void pd_rms_norm(int kind, const void *x, int64_t outer_stride, int64_t inner_stride, int weight_kind,
                 const void *weight, void *out, int64_t outer, int64_t inner, int64_t dim, double eps, int threads)
{
#pragma omp parallel for collapse(2) num_threads(threads_for(outer *inner *dim, threads))
    for (int64_t i = 0; i < outer; i++)
        for (int64_t j = 0; j < inner; j++) {
            int64_t from = i * outer_stride + j * inner_stride, to = (i * inner + j) * dim;
            __m512 squares = _mm512_setzero_ps();
            for (int64_t d = 0; d < dim; d += LANES) {
                __m512 value = load(x, from + d, kind);
                squares = _mm512_fmadd_ps(value, value, squares);
            }
            float mean = _mm512_reduce_add_ps(squares) / (float)dim;
            __m512 factor = _mm512_set1_ps(1.0f / sqrtf(mean + (float)eps));
            for (int64_t d = 0; d < dim; d += LANES) {
                __m512 normed = _mm512_mul_ps(load(x, from + d, kind), factor);
                store(out, to + d, _mm512_mul_ps(normed, load(weight, d, weight_kind)), kind);
            }
        }
}

/* out [tokens, heads, dim] = x * cos + swapped halves of x * sin; cos and sin [tokens, dim]. */
void pd_rotary(int kind, const void *x, int64_t x_stride, const void *cos, const void *sin, void *out, int64_t tokens,
               int64_t heads, int64_t dim, int threads)
{
#pragma omp parallel for num_threads(threads_for(tokens *heads *dim, threads))
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t from = t * x_stride + h * dim, to = (t * heads + h) * dim;
            for (int64_t d = 0; d < dim; d += LANES) {
                int64_t other = d < dim / 2 ? d + dim / 2 : d - dim / 2;
                __m512 kept = _mm512_mul_ps(load(x, from + d, kind), load(cos, t * dim + d, kind));
                __m512 turned = load(x, from + other, kind);
                store(out, to + d, _mm512_fmadd_ps(turned, load(sin, t * dim + d, kind), kept), kind);
            }
        }
}

/* out [tokens, dim] = silu(gate) * up; x [tokens, 2 * dim] holds gate and up side by side. */
void pd_silu_and_mul(int kind, const void *x, void *out, int64_t tokens, int64_t dim, int threads)
{
    const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for num_threads(threads_for(tokens *dim, threads))
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d += LANES) {
            __m512 gate = load(x, 2 * t * dim + d, kind), up = load(x, (2 * t + 1) * dim + d, kind);
            __m512 decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
            store(out, t * dim + d, _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(one, decay)), up), kind);
        }
}

/* Rows of `row_bytes` into the two caches, row t into slots[t]. Strides in bytes. */
void pd_write_kv(const char *key, int64_t key_stride, const char *value, int64_t value_stride, char *k_cache,
                 char *v_cache, const int32_t *slots, int64_t tokens, int64_t key_bytes, int64_t value_bytes,
                 int threads)
{
#pragma omp parallel for num_threads(threads_for(tokens *key_bytes / 2, threads))
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(k_cache + slots[t] * key_bytes, key + t * key_stride, (size_t)key_bytes);
        memcpy(v_cache + slots[t] * value_bytes, value + t * value_stride, (size_t)value_bytes);
    }
}

/* What stands between the matrix products: norm, rotation, activation, writing the cache. Rows never meet. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "vectors.h"

INLINE void norm_row(int kind, const void *x, int64_t from, int weight_kind, const void *weight, void *out, int64_t to,
                     int64_t dim, float eps)
{
    __m512 squares = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += LANES) {
        __m512 value = load(x, from + d, kind);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    float mean = _mm512_reduce_add_ps(squares) / (float)dim;
    __m512 factor = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
    for (int64_t d = 0; d < dim; d += LANES) {
        __m512 normed = _mm512_mul_ps(load(x, from + d, kind), factor);
        store(out, to + d, _mm512_mul_ps(normed, load(weight, d, weight_kind)), kind);
    }
}

/* out[i][j] = x[i][j] / rms(x[i][j]) * weight; x [outer, inner, dim] with any strides (elements), out contiguous. */
void pd_rms_norm(int kind, const void *x, int64_t outer_stride, int64_t inner_stride, int weight_kind,
                 const void *weight, void *out, int64_t outer, int64_t inner, int64_t dim, double eps, int threads)
{
#pragma omp parallel for collapse(2) num_threads(threads_for(outer *inner *dim, threads))
    for (int64_t i = 0; i < outer; i++)
        for (int64_t j = 0; j < inner; j++) {
            int64_t from = i * outer_stride + j * inner_stride, to = (i * inner + j) * dim;
            norm_row(kind, x, from, weight_kind, weight, out, to, dim, (float)eps);
        }
}

/*
 * sum = x + residual, normed = sum / rms(sum) * weight, all [rows, dim] and contiguous; the norm is of the rounded sum.
 * `sum` may be the memory of x or residual.
 */
void pd_add_rms_norm(int kind, const void *x, const void *residual, int weight_kind, const void *weight, void *normed,
                     void *sum, int64_t rows, int64_t dim, double eps, int threads)
{
#pragma omp parallel for num_threads(threads_for(rows *dim, threads))
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t d = row * dim; d < (row + 1) * dim; d += LANES)
            store(sum, d, _mm512_add_ps(load(x, d, kind), load(residual, d, kind)), kind);
        norm_row(kind, sum, row * dim, weight_kind, weight, normed, row * dim, dim, (float)eps);
    }
}

/* Elements [to, to + heads * dim) of `out` = x * cos + swapped halves of x * sin, for the heads of one token. */
INLINE void rotate_heads(int kind, const void *x, int64_t from, const void *cos, const void *sin, int64_t token,
                         void *out, int64_t to, int64_t heads, int64_t dim)
{
    for (int64_t h = 0; h < heads * dim; h += dim)
        for (int64_t d = 0; d < dim; d += LANES) {
            int64_t other = d < dim / 2 ? d + dim / 2 : d - dim / 2;
            __m512 kept = _mm512_mul_ps(load(x, from + h + d, kind), load(cos, token * dim + d, kind));
            __m512 turned = load(x, from + h + other, kind);
            store(out, to + h + d, _mm512_fmadd_ps(turned, load(sin, token * dim + d, kind), kept), kind);
        }
}

/* out [tokens, heads, dim] = x rotated; cos and sin [tokens, dim]. */
void pd_rotary(int kind, const void *x, int64_t x_stride, const void *cos, const void *sin, void *out, int64_t tokens,
               int64_t heads, int64_t dim, int threads)
{
#pragma omp parallel for num_threads(threads_for(tokens *heads *dim, threads))
    for (int64_t t = 0; t < tokens; t++)
        rotate_heads(kind, x, t * x_stride, cos, sin, t, out, t * heads * dim, heads, dim);
}

/*
 * Rotates the step's queries into a->out, which must be a->query too, and its keys into the cache, beside the values;
 * then attends. False: out of memory.
 */
int pd_rotate_write_attend(int kind, const struct new_tokens *n, const struct attention *a, int threads)
{
    int64_t bytes = size_of(kind), width = a->kv_heads * a->dim;
#pragma omp parallel for num_threads(threads_for(n->tokens *a->heads *a->dim, threads))
    for (int64_t t = 0; t < n->tokens; t++) {
        int64_t slot = n->slots[t] * width;
        rotate_heads(kind, n->query, t * n->query_stride, n->cos, n->sin, t, a->out, t * a->query_stride, a->heads,
                     a->dim);
        rotate_heads(kind, n->key, t * n->key_stride, n->cos, n->sin, t, a->k_cache, slot, a->kv_heads, a->dim);
        memcpy(a->v_cache + slot * bytes, n->value + t * n->value_stride * bytes, (size_t)(width * bytes));
    }
    return pd_attention(kind, a, threads);
}

/* out [tokens, dim] = silu(gate) * up; x [tokens, 2 * dim] holds gate and up side by side. */
void pd_silu_and_mul(int kind, const void *x, void *out, int64_t tokens, int64_t dim, int threads)
{
#pragma omp parallel for num_threads(threads_for(tokens *dim, threads))
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < dim; d += LANES) {
            __m512 gate = load(x, 2 * t * dim + d, kind), up = load(x, (2 * t + 1) * dim + d, kind);
            store(out, t * dim + d, silu_times(gate, up), kind);
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

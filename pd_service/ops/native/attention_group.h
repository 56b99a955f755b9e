/*
 * Attention of some rows to one group of 64 keys, and the merging of what groups add; `attention.c` says to what end.
 *
 * Two ways to the same sums in the same order: many rows multiply keys that were laid out for them, a few take each key
 * as it comes from memory.
 */
#pragma once
#include <math.h>
#include <string.h>

#include "attention.h"
#include "vectors.h"

enum {
    GROUP = 64,   /* keys at a time */
    QUERIES = 96, /* rows of a unit, unless more heads than that share a cached one */
    TILE = 6,     /* rows: 6 x 4 sums, 4 operands and a factor fill the 32 registers */
    FEW = 8,      /* rows of a unit, up to which keys are not worth laying out anew */
};

/* Of up to `rows` rows: what they have gathered so far, or what one group adds. */
struct part {
    float *top, *mass, *out; /* [rows], [rows], [rows, padded] */
};

/* What one thread works in, all float32. `padded` is dim, up to a multiple of 64; `state` has room for all heads. */
struct scratch {
    float *query, *keys, *values, *scores;
    struct part state, part;
    int64_t padded;
};

INLINE void transpose(__m512 r[LANES])
{
    __m512 t[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512 even01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), odd01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        __m512 even23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        __m512 odd23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_f32x4(even01, even23, 0x88);
        t[8 + c] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
        t[4 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
        t[12 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        r[i] = t[i];
}

/* Where the keys of a group lie, in elements from the start of the cache; -1 for those outside [first, last). */
INLINE void locate(const struct attention *a, const int32_t *table, int64_t head, int64_t base, int64_t first,
                   int64_t last, int64_t at[GROUP])
{
    int64_t block = base / a->block_size, offset = base % a->block_size;
    for (int64_t i = 0; i < GROUP; i++) {
        at[i] = -1;
        if (base + i >= first && base + i < last)
            at[i] = ((table[block] * a->block_size + offset) * a->kv_heads + head) * a->dim;
        if (++offset == a->block_size) {
            block++;
            offset = 0;
        }
    }
}

/* Brings the key and the value at `at` into the cache. */
INLINE void fetch(int kind, const struct attention *a, int64_t at)
{
    if (at < 0)
        return;
    for (int64_t byte = 0; byte < a->dim * size_of(kind); byte += 64) {
        _mm_prefetch(a->k_cache + at * size_of(kind) + byte, _MM_HINT_T0);
        _mm_prefetch(a->v_cache + at * size_of(kind) + byte, _MM_HINT_T0);
    }
}

/* Column r of the result is the key at at[r], dimensions d to d + 15. */
INLINE void load_keys(int kind, const struct attention *a, const int64_t *at, int64_t d, __m512 columns[LANES])
{
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++)
        columns[r] = at[r] < 0 ? _mm512_setzero_ps() : load(a->k_cache, at[r] + d, kind);
    transpose(columns);
}

/* Keys at `at` as [dim][64], values as [64][padded], zero where there are none; what lies at `next` is fetched. */
INLINE void take(int kind, const struct attention *a, struct scratch *s, const int64_t at[GROUP],
                 const int64_t next[GROUP])
{
    for (int64_t i = 0; i < GROUP; i += LANES)
        for (int64_t d = 0; d < a->dim; d += LANES) {
            __m512 columns[LANES];
            load_keys(kind, a, at + i, d, columns);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                _mm512_storeu_ps(s->keys + (d + r) * GROUP + i, columns[r]);
        }
    for (int64_t i = 0; i < GROUP; i++) {
        fetch(kind, a, next[i]);
        for (int64_t d = 0; d < a->dim; d += LANES) {
            __m512 value = at[i] < 0 ? _mm512_setzero_ps() : load(a->v_cache, at[i] + d, kind);
            _mm512_storeu_ps(s->values + i * s->padded + d, value);
        }
    }
}

/* out [rows, 64] = x [rows, depth] times y [depth, 64]; each sum is one chain over ascending depth. */
INLINE void multiply_tile(int rows, const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t depth,
                          float *out, int64_t out_stride)
{
    __m512 sums[TILE][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++)
            sums[r][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++, y += y_stride) {
        __m512 y0 = _mm512_loadu_ps(y), y1 = _mm512_loadu_ps(y + 16);
        __m512 y2 = _mm512_loadu_ps(y + 32), y3 = _mm512_loadu_ps(y + 48);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m512 factor = _mm512_set1_ps(x[r * x_stride + k]);
            sums[r][0] = _mm512_fmadd_ps(factor, y0, sums[r][0]);
            sums[r][1] = _mm512_fmadd_ps(factor, y1, sums[r][1]);
            sums[r][2] = _mm512_fmadd_ps(factor, y2, sums[r][2]);
            sums[r][3] = _mm512_fmadd_ps(factor, y3, sums[r][3]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++)
            _mm512_storeu_ps(out + r * out_stride + v * LANES, sums[r][v]);
}

static void multiply(int64_t rows, const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t depth,
                     float *out, int64_t out_stride)
{
    for (int64_t r = 0; r < rows; r += TILE, x += TILE * x_stride, out += TILE * out_stride)
        switch (at_most(TILE, rows - r)) {
        case 1: multiply_tile(1, x, x_stride, y, y_stride, depth, out, out_stride); break;
        case 2: multiply_tile(2, x, x_stride, y, y_stride, depth, out, out_stride); break;
        case 3: multiply_tile(3, x, x_stride, y, y_stride, depth, out, out_stride); break;
        case 4: multiply_tile(4, x, x_stride, y, y_stride, depth, out, out_stride); break;
        case 5: multiply_tile(5, x, x_stride, y, y_stride, depth, out, out_stride); break;
        case 6: multiply_tile(6, x, x_stride, y, y_stride, depth, out, out_stride); break;
        }
}

/* The same sums as `multiply` makes, in the same order, for up to 8 rows and without laying anything out. Each load of a key fetches the
 * same part of the one at `next`: in one burst they would fill the core's queue of loads, and it would wait. */
INLINE void score_few(int kind, int rows, const struct attention *a, struct scratch *s, const float *query,
                      const int64_t at[GROUP], const int64_t next[GROUP])
{
    for (int64_t i = 0; i < GROUP; i += LANES) {
        __m512 sums[FEW], columns[LANES];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sums[r] = _mm512_setzero_ps();
        for (int64_t d = 0; d < a->dim; d += LANES) {
            load_keys(kind, a, at + i, d, columns);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                _mm_prefetch(a->k_cache + (next[i + r] + d) * size_of(kind), _MM_HINT_T0);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(query[r * a->dim + d + c]), columns[c], sums[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            _mm512_storeu_ps(s->scores + r * GROUP + i, sums[r]);
    }
}

INLINE void sum_values(int kind, int rows, int vectors, const struct attention *a, struct scratch *s, float *out,
                       const int64_t at[GROUP], const int64_t next[GROUP], int64_t d)
{
    __m512 sums[FEW][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r][v] = _mm512_setzero_ps();
    for (int64_t i = 0; i < GROUP; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            _mm_prefetch(a->v_cache + (next[i] + d + v * LANES) * size_of(kind), _MM_HINT_T0);
        if (at[i] < 0)
            continue;
        __m512 value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            value[v] = load(a->v_cache, at[i] + d + v * LANES, kind);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 weight = _mm512_set1_ps(s->scores[r * GROUP + i]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[r][v] = _mm512_fmadd_ps(weight, value[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(out + r * s->padded + d + v * LANES, sums[r][v]);
}

INLINE void sum_few(int kind, int rows, int vectors, const struct attention *a, struct scratch *s, float *out,
                    const int64_t at[GROUP], const int64_t next[GROUP])
{
    int64_t d = 0;
    for (; d + vectors * LANES <= a->dim; d += vectors * LANES)
        sum_values(kind, rows, vectors, a, s, out, at, next, d);
    for (; d < a->dim; d += LANES)
        sum_values(kind, rows, 1, a, s, out, at, next, d);
}

/* One row's scores of the keys from `base` become weights; it sees keys (position - window, position]. */
INLINE void weigh(const struct attention *a, struct scratch *s, struct part part, int64_t row, int64_t base,
                  int64_t position)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    const __m512i last = _mm512_set1_epi32((int)(position - base));
    const __m512i before = _mm512_set1_epi32((int)at_least(-1, position - base - a->window));
    __m512 score[4], top = nothing, sum = _mm512_setzero_ps();
    for (int v = 0; v < 4; v++) {
        __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32(v * LANES));
        __mmask16 is_seen = _mm512_cmple_epi32_mask(key, last) & _mm512_cmpgt_epi32_mask(key, before);
        __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(s->scores + row * GROUP + v * LANES), _mm512_set1_ps(a->scale));
        score[v] = _mm512_mask_mov_ps(nothing, is_seen, scaled);
        top = _mm512_max_ps(top, score[v]);
    }
    part.top[row] = _mm512_reduce_max_ps(top);
    const __m512 highest = _mm512_set1_ps(part.top[row] == -INFINITY ? 0.0f : part.top[row]);
    for (int v = 0; v < 4; v++) {
        __m512 weight = exponential(_mm512_sub_ps(score[v], highest));
        _mm512_storeu_ps(s->scores + row * GROUP + v * LANES, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    part.mass[row] = _mm512_reduce_add_ps(sum);
}

/* A part in which a row sees nothing leaves its state as it is. */
INLINE void merge(struct part state, struct part part, int64_t row, int64_t padded)
{
    if (part.top[row] == -INFINITY)
        return;
    float top = state.top[row] > part.top[row] ? state.top[row] : part.top[row];
    __m512 old = exponential(_mm512_set1_ps(state.top[row] - top));
    __m512 new = exponential(_mm512_set1_ps(part.top[row] - top));
    state.top[row] = top;
    state.mass[row] = state.mass[row] * _mm512_cvtss_f32(old) + part.mass[row] * _mm512_cvtss_f32(new);
    for (int64_t d = row * padded; d < (row + 1) * padded; d += LANES) {
        __m512 added = _mm512_mul_ps(_mm512_loadu_ps(part.out + d), new);
        _mm512_storeu_ps(state.out + d, _mm512_fmadd_ps(_mm512_loadu_ps(state.out + d), old, added));
    }
}

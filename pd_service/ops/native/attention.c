/*
 * Causal attention straight on the blocks of the cache, prompts and decodes alike.
 *
 * A unit of work is one request's chunk of up to `QUERIES` (token, head) rows that ask the same cached head. It walks
 * the keys in groups of 64 at fixed positions, with a running maximum and sum (Milakov and Gimelshein, 2018; Dao et
 * al., 2022). Keys a row may not see count as exactly nothing, so a row's result depends on its position and what it
 * sees alone: not on the other rows, the chunks of its prompt, where its blocks lie, or the number of threads.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

enum {
    GROUP = 64,   /* keys at a time */
    QUERIES = 96, /* rows of a unit, unless more heads than that share a cached one */
    TILE = 6,     /* rows: 6 x 4 sums, 4 operands and a factor fill the 32 registers */
    FEW = 8,      /* rows of a unit, up to which keys are not worth laying out anew */
};

struct attention {
    const char *query, *k_cache, *v_cache;
    char *out;
    const int32_t *starts, *query_lens, *kv_lens, *tables; /* [requests] each, tables [requests, table_width] */
    const float *sinks;                                    /* [heads], a score that takes weight only; may be null */
    int64_t requests, table_width, block_size, heads, kv_heads, dim, query_stride;
    int64_t window; /* tokens a query sees, itself included */
    float scale;
};

/* What one thread works in, all float32. `padded` is dim, up to a multiple of 64. */
struct scratch {
    float *query, *keys, *values, *scores, *out, *top, *mass;
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
        __m512 even01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), even23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        __m512 odd01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd), odd23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
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

/* out [rows, 64] += x [rows, depth] times y [depth, 64]; each sum is one chain over ascending depth. */
INLINE void multiply_tile(int rows, const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t depth,
                          float *out, int64_t out_stride)
{
    __m512 sums[TILE][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++)
            sums[r][v] = _mm512_loadu_ps(out + r * out_stride + v * LANES);
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

/* The same sums as `multiply` makes, in the same order, for up to 8 rows and without laying anything out. */
INLINE void score_few(int kind, int rows, const struct attention *a, struct scratch *s, const int64_t at[GROUP],
                      const int64_t next[GROUP])
{
    for (int64_t i = 0; i < GROUP; i += LANES) {
        __m512 sums[FEW], columns[LANES];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sums[r] = _mm512_setzero_ps();
        for (int64_t d = 0; d < a->dim; d += LANES) {
            load_keys(kind, a, at + i, d, columns);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(s->query[r * a->dim + d + c]), columns[c], sums[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            _mm512_storeu_ps(s->scores + r * GROUP + i, sums[r]);
        for (int r = 0; r < LANES; r++)
            fetch(kind, a, next[i + r]);
    }
}

INLINE void sum_values(int kind, int rows, int vectors, const struct attention *a, struct scratch *s,
                       const int64_t at[GROUP], int64_t d)
{
    __m512 sums[FEW][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r][v] = _mm512_loadu_ps(s->out + r * s->padded + d + v * LANES);
    for (int64_t i = 0; i < GROUP; i++) {
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
            _mm512_storeu_ps(s->out + r * s->padded + d + v * LANES, sums[r][v]);
}

INLINE void sum_few(int kind, int rows, int vectors, const struct attention *a, struct scratch *s,
                    const int64_t at[GROUP])
{
    int64_t d = 0;
    for (; d + vectors * LANES <= a->dim; d += vectors * LANES)
        sum_values(kind, rows, vectors, a, s, at, d);
    for (; d < a->dim; d += LANES)
        sum_values(kind, rows, 1, a, s, at, d);
}

/* One row's scores of the keys from `base` become weights; it sees keys (position - window, position]. */
INLINE void weigh(const struct attention *a, struct scratch *s, int64_t row, int64_t base, int64_t position)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    const __m512i last = _mm512_set1_epi32((int)(position - base));
    const __m512i before = _mm512_set1_epi32((int)at_least(-1, position - base - a->window));
    __m512 score[4], top = nothing;
    for (int v = 0; v < 4; v++) {
        __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32(v * LANES));
        __mmask16 is_seen = _mm512_cmple_epi32_mask(key, last) & _mm512_cmpgt_epi32_mask(key, before);
        __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(s->scores + row * GROUP + v * LANES), _mm512_set1_ps(a->scale));
        score[v] = _mm512_mask_mov_ps(nothing, is_seen, scaled);
        top = _mm512_max_ps(top, score[v]);
    }
    float old = s->top[row], new = _mm512_reduce_max_ps(top);
    new = new > old ? new : old;
    if (new == -INFINITY) /* nothing seen so far: all weights are 0 */
        new = -FLT_MAX;
    __m512 sum = _mm512_setzero_ps();
    for (int v = 0; v < 4; v++) {
        __m512 weight = exponential(_mm512_sub_ps(score[v], _mm512_set1_ps(new)));
        _mm512_storeu_ps(s->scores + row * GROUP + v * LANES, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    __m512 shrink = exponential(_mm512_set1_ps(old - new));
    s->mass[row] = s->mass[row] * _mm512_cvtss_f32(shrink) + _mm512_reduce_add_ps(sum);
    s->top[row] = new;
    if (new != old)
        for (int64_t d = 0; d < s->padded; d += LANES) {
            float *out = s->out + row * s->padded + d;
            _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), shrink));
        }
}

/* Adds one group of keys to the unit's rows, of which row r belongs to the token at position + r / share. */
INLINE void add_group(int kind, const struct attention *a, struct scratch *s, int64_t rows, int64_t base,
                      int64_t position, const int64_t at[GROUP], const int64_t next[GROUP])
{
    int64_t share = a->heads / a->kv_heads;
    if (rows > FEW) {
        take(kind, a, s, at, next);
        memset(s->scores, 0, (size_t)(rows * GROUP) * sizeof(float));
        multiply(rows, s->query, a->dim, s->keys, GROUP, a->dim, s->scores, GROUP);
    } else if (rows > 4)
        score_few(kind, 8, a, s, at, next);
    else
        score_few(kind, 4, a, s, at, next);
    for (int64_t r = 0; r < rows; r++)
        weigh(a, s, r, base, position + r / share);
    if (rows > FEW)
        for (int64_t d = 0; d < s->padded; d += GROUP)
            multiply(rows, s->scores, GROUP, s->values + d, s->padded, GROUP, s->out + d, s->padded);
    else if (rows > 4)
        sum_few(kind, 8, 2, a, s, at);
    else
        sum_few(kind, 4, 4, a, s, at);
}

/* Tokens [first, last) of a request, all of which ask `head` of the cache. */
INLINE void unit(int kind, const struct attention *a, struct scratch *s, int64_t request, int64_t head, int64_t first,
                 int64_t last)
{
    int64_t share = a->heads / a->kv_heads, rows = (last - first) * share;
    int64_t position = a->kv_lens[request] - a->query_lens[request] + first, token = a->starts[request] + first;
    int64_t seen_from = at_least(0, position - a->window + 1), seen_to = position + last - first;
    int64_t at[2][GROUP], base = seen_from / GROUP * GROUP;
    const int32_t *table = a->tables + request * a->table_width;
    locate(a, table, head, base, seen_from, seen_to, at[0]);
    for (int64_t i = 0; i < GROUP; i++)
        fetch(kind, a, at[0][i]);
    for (int64_t r = 0; r < rows; r++) {
        int64_t from = (token + r / share) * a->query_stride + (head * share + r % share) * a->dim;
        for (int64_t d = 0; d < a->dim; d += LANES)
            _mm512_storeu_ps(s->query + r * a->dim + d, load(a->query, from + d, kind));
        s->top[r] = a->sinks ? a->sinks[head * share + r % share] : -INFINITY;
        s->mass[r] = a->sinks ? 1.0f : 0.0f;
    }
    memset(s->out, 0, (size_t)(at_least(FEW, rows) * s->padded) * sizeof(float));
    for (int turn = 0; base < seen_to; base += GROUP, turn ^= 1) {
        locate(a, table, head, base + GROUP, seen_from, seen_to, at[turn ^ 1]);
        add_group(kind, a, s, rows, base, position, at[turn], at[turn ^ 1]);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t to = ((token + r / share) * a->heads + head * share + r % share) * a->dim;
        for (int64_t d = 0; d < a->dim; d += LANES) {
            __m512 value = _mm512_loadu_ps(s->out + r * s->padded + d);
            store(a->out, to + d, _mm512_div_ps(value, _mm512_set1_ps(s->mass[r])), kind);
        }
    }
}

INLINE float *cut(float **memory, int64_t count)
{
    float *piece = *memory;
    *memory += (count + LANES - 1) / LANES * LANES;
    return piece;
}

/* All units of all requests; the longest waits come first, so that threads end together. False: out of memory. */
static int run(int kind, const struct attention *a, int threads)
{
    int64_t share = a->heads / a->kv_heads, tokens = at_least(1, QUERIES / share);
    int64_t rows = at_least(FEW, tokens * share);
    int64_t padded = (a->dim + GROUP - 1) / GROUP * GROUP;
    int64_t ends[a->requests + 1]; /* units of the requests before */
    ends[0] = 0;
    for (int64_t i = 0; i < a->requests; i++)
        ends[i + 1] = ends[i] + (a->query_lens[i] + tokens - 1) / tokens * a->kv_heads;
    int64_t units = ends[a->requests];
    int64_t floats = rows * (a->dim + padded + GROUP) + GROUP * (a->dim + padded) + 2 * rows + 7 * LANES;
    float *memory = aligned_alloc(64, (size_t)((floats * 4 * threads + 63) / 64 * 64));
    if (!memory)
        return 0;
#pragma omp parallel num_threads(units > 1 ? threads : 1)
    {
        float *own = memory + omp_get_thread_num() * floats;
        struct scratch s = {.padded = padded};
        s.query = cut(&own, rows * a->dim);
        s.keys = cut(&own, GROUP * a->dim);
        s.values = cut(&own, GROUP * padded);
        s.scores = cut(&own, rows * GROUP);
        s.out = cut(&own, rows * padded);
        s.top = cut(&own, rows);
        s.mass = cut(&own, rows);
        memset(memory + omp_get_thread_num() * floats, 0, (size_t)floats * sizeof(float)); /* padding is read */
        int64_t request = a->requests - 1;
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = units - 1; u >= 0; u--) {
            while (ends[request] > u)
                request--;
            int64_t first = (u - ends[request]) / a->kv_heads * tokens;
            unit(kind, a, &s, request, (u - ends[request]) % a->kv_heads, first,
                 at_most(first + tokens, a->query_lens[request]));
        }
    }
    free(memory);
    return 1;
}

int pd_attention(int kind, const struct attention *a, int threads)
{
    return kind == FLOAT32 ? run(FLOAT32, a, threads) : run(BFLOAT16, a, threads);
}

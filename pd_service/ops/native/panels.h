/*
 * Products with panels of weights: reads them at memory speed for few rows, computes at full width for many.
 *
 * Weights [width, depth] lie as [width / 32][depth][32], in bfloat16 as [width / 32][depth / 2][32][2]. Every output is
 * one chain of fused multiply-adds over ascending depth, whatever rows, tiles and threads there are: a row of the
 * result never depends on the others, to the last bit.
 */
#pragma once
#include "vectors.h"

enum {
    PANEL = 32,
    TILE = 12,                  /* rows: 12 x 2 sums, 2 weights and a factor fill the 32 registers */
    CACHED_BYTES = 400 * 1024,  /* of `x`, to stay in the second-level cache while panels pass by */
};

struct product {
    const char *x, *weights, *bias; /* bias may be null */
    char *out;
    int64_t x_stride, out_stride; /* elements from row to row */
    int64_t depth;
};

/* A tile's sums. `ahead` is fetched into the cache meanwhile, `ahead_step` bytes per step of depth. */
#define TILE_OF(name, factor_t, SUMS)                                                                                  \
    INLINE void name(int rows, const factor_t *x, int64_t x_stride, const factor_t *w, int64_t steps,                  \
                     const char *ahead, int64_t ahead_step, __m512 sums[TILE][2])                                      \
    {                                                                                                                  \
        for (int64_t k = 0; k < steps; k++, w += PANEL, x++, ahead += ahead_step) {                                    \
            __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + LANES);                                           \
            _mm_prefetch(ahead, _MM_HINT_T0);                                                                          \
            if (ahead_step > 64)                                                                                       \
                _mm_prefetch(ahead + 64, _MM_HINT_T0);                                                                 \
            _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++)                                                    \
            {                                                                                                          \
                __m512 factor = _mm512_set1_ps(x[r * x_stride]);                                                       \
                sums[r][0] = SUMS(sums[r][0], factor, w0);                                                             \
                sums[r][1] = SUMS(sums[r][1], factor, w1);                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }

#define SUM_FLOAT32(sum, factor, w) _mm512_fmadd_ps(factor, w, sum)
TILE_OF(sums_float32, float, SUM_FLOAT32)
#ifdef __AVX512BF16__
/* A step of depth is a pair of bfloat16 here, moved about in the bits of a float. */
#define SUM_BFLOAT16(sum, factor, w) _mm512_dpbf16_ps(sum, (__m512bh)(factor), (__m512bh)(w))
TILE_OF(sums_bfloat16, float, SUM_BFLOAT16)
#endif

INLINE void tile(int kind, int rows, const struct product *p, int64_t row, int64_t panel, const char *ahead,
                 int64_t ahead_step)
{
    __m512 sums[TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    int64_t bytes = size_of(kind), pair = 4 / bytes;
    const float *x = (const float *)(p->x + row * p->x_stride * bytes);
    const float *w = (const float *)(p->weights + panel * p->depth * PANEL * bytes);
#ifdef __AVX512BF16__
    if (kind == BFLOAT16)
        sums_bfloat16(rows, x, p->x_stride / pair, w, p->depth / pair, ahead, ahead_step, sums);
#endif
    if (kind == FLOAT32)
        sums_float32(rows, x, p->x_stride, w, p->depth, ahead, ahead_step, sums);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            int64_t column = panel * PANEL + half * LANES;
            __m512 sum = sums[r][half];
            if (p->bias)
                sum = _mm512_add_ps(sum, load(p->bias, column, kind));
            store(p->out, (row + r) * p->out_stride + column, sum, kind);
        }
}

#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        tile(kind, n, p, row, panel, ahead, ahead_step);                                                               \
        break;
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

static void tile_float32(int rows, const struct product *p, int64_t row, int64_t panel, const char *ahead,
                         int64_t ahead_step)
{
    const int kind = FLOAT32;
    switch (rows) { CASES }
}

static void tile_bfloat16(int rows, const struct product *p, int64_t row, int64_t panel, const char *ahead,
                          int64_t ahead_step)
{
    const int kind = BFLOAT16;
    switch (rows) { CASES }
}

/*
 * One panel times rows [first, last), in tiles of nearly equal height. A single tile waits for memory alone and fetches
 * a little ahead of itself; several share the work of fetching the next panel while they compute.
 */
INLINE void panel_times_rows(int kind, const struct product *p, int64_t panel, int64_t first, int64_t last)
{
    int64_t rows = last - first, tiles = (rows + TILE - 1) / TILE;
    int64_t panel_bytes = p->depth * PANEL * size_of(kind);
    const char *weights = p->weights + panel * panel_bytes;
    for (int64_t i = 0; i < tiles; i++) {
        int64_t from = first + rows * i / tiles, to = first + rows * (i + 1) / tiles;
        const char *ahead = tiles == 1 ? weights + 4096 : weights + panel_bytes + panel_bytes * i / tiles;
        if (kind == FLOAT32)
            tile_float32((int)(to - from), p, from, panel, ahead, 128 / tiles);
        else
            tile_bfloat16((int)(to - from), p, from, panel, ahead, 128 / tiles);
    }
}

/* Rows that stay in the cache while panels pass by: of `rows`, in parts of nearly that size and whole tiles. */
INLINE int64_t rows_at_once(int kind, int64_t rows, int64_t depth)
{
    int64_t cached = at_least(TILE, CACHED_BYTES / (depth * size_of(kind)));
    int64_t parts = at_least(1, (rows + cached / 2) / cached);
    return (rows + parts * TILE - 1) / (parts * TILE) * TILE;
}

/* This thread's share of the panels times all rows. */
INLINE void share_of_product(int kind, const struct product *p, int64_t rows, int64_t panels)
{
    int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
    int64_t at_once = rows_at_once(kind, rows, p->depth);
    for (int64_t row = 0; row < rows; row += at_once)
        for (int64_t panel = panels * thread / count; panel < panels * (thread + 1) / count; panel++)
            panel_times_rows(kind, p, panel, row, at_most(row + at_once, rows));
}

/* Matrix products with packed weights, alone and as a whole MLP; `panels.h` says how. */
#include <stddef.h>
#include <sys/mman.h>

#include "kernels.h"
#include "panels.h"

/* out [rows, width] = x [rows, depth] times weights, plus bias. width: a multiple of 32; depth: even for bfloat16. */
void pd_linear(int kind, const void *x, int64_t x_stride, const void *weights, const void *bias, void *out,
               int64_t rows, int64_t depth, int64_t width, int threads)
{
    const struct product p = {x, weights, bias, out, x_stride, width, depth};
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_of_product(kind, &p, rows, width / PANEL);
}

enum { MLP_ROWS = 252 }; /* at once: whole tiles, whose gates and ups stay in the second-level cache */

/* Columns [column, column + 32) of `inner`, for rows [first, last): silu(gate) * up, while both are in the cache. */
static void activated_panel(int kind, const struct product *gate_up, int64_t panel, int64_t panels, int64_t first,
                            int64_t last, char *inner)
{
    char sides[MLP_ROWS * 2 * PANEL * sizeof(float)] __attribute__((aligned(64))); /* [rows, gate and up, 32] */
    int64_t bytes = size_of(kind), panel_bytes = gate_up->depth * PANEL * bytes;
    for (int side = 0; side < 2; side++) {
        const struct product half = {
            .x = gate_up->x + first * gate_up->x_stride * bytes,
            .weights = gate_up->weights + (panel + side * panels) * panel_bytes,
            .out = sides + side * PANEL * bytes,
            .x_stride = gate_up->x_stride,
            .out_stride = 2 * PANEL,
            .depth = gate_up->depth,
        };
        panel_times_rows(kind, &half, 0, 0, last - first);
    }
    for (int64_t row = first; row < last; row++)
        for (int64_t d = 0; d < PANEL; d += LANES) {
            int64_t from = (row - first) * 2 * PANEL + d, to = (row * panels + panel) * PANEL + d;
            store(inner, to, silu_times(load(sides, from, kind), load(sides, from + PANEL, kind)), kind);
        }
}

/*
 * out [rows, width] = (silu(gate) * up) times down, where gate and up [rows, dim] = x [rows, depth] times gate_up, whose
 * panels hold all gates before all ups. inner [rows, dim] is what it works in. dim and width: multiples of 32.
 */
void pd_gated_mlp(int kind, const void *x, int64_t x_stride, const void *gate_up, const void *down, void *inner,
                  void *out, int64_t rows, int64_t depth, int64_t dim, int64_t width, int threads)
{
    const struct product first = {.x = x, .weights = gate_up, .x_stride = x_stride, .depth = depth};
    const struct product second = {inner, down, NULL, out, dim, width, dim};
    int64_t panels = dim / PANEL, at_once = at_most(MLP_ROWS, rows_at_once(kind, rows, depth));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
        for (int64_t row = 0; row < rows; row += at_once)
            for (int64_t panel = panels * thread / count; panel < panels * (thread + 1) / count; panel++)
                activated_panel(kind, &first, panel, panels, row, at_most(row + at_once, rows), inner);
#pragma omp barrier
        share_of_product(kind, &second, rows, width / PANEL);
    }
}

/* Whether pd_linear computes bfloat16: it needs an instruction that not every processor with AVX-512 has. */
int pd_has_bfloat16(void)
{
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* Asks for large pages behind these bytes, before they are first written: fewer misses in the page tables. */
void pd_use_large_pages(void *start, int64_t bytes)
{
    const uintptr_t large = 2 << 20, first = ((uintptr_t)start + large - 1) / large * large;
    const uintptr_t last = ((uintptr_t)start + (uintptr_t)bytes) / large * large;
    if (first < last)
        madvise((void *)first, last - first, MADV_HUGEPAGE); /* a hint: it may fail without harm */
}

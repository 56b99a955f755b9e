/*
 * Causal attention straight on the blocks of the cache, prompts and decodes alike.
 *
 * Keys are walked in groups of 64 at fixed positions. Each group gives every row (one head of one token) a part: the
 * highest score, the sum of the weights relative to it, and the weighted sum of values; parts are merged in ascending
 * order (online softmax: Milakov and Gimelshein, 2018; Dao et al., 2022). Keys a row may not see count as exactly
 * nothing, so its result depends on its position and what it sees alone: not on the other rows, the chunks of its
 * prompt, where its blocks lie, or the number of threads.
 *
 * Work is cut into units: of a prompt, chunks of rows that ask one head of the cache; of a decode, all heads over a
 * range of groups, since the heads of a key lie side by side. A decode whose groups are several units' keeps its parts
 * until all are there.
 */
#include <stdlib.h>

#include "attention_group.h"

/* Rows of tokens [first, last) of a request that ask `head` of the cache, and where row r stands. */
struct rows {
    int64_t request, head, first, last, share, position, token;
};

INLINE struct rows rows_of(const struct attention *a, int64_t request, int64_t head, int64_t first, int64_t last)
{
    int64_t past = a->kv_lens[request] - a->query_lens[request];
    return (struct rows){request, head, first, last, a->heads / a->kv_heads, past + first, a->starts[request] + first};
}

INLINE void load_rows(int kind, const struct attention *a, const struct rows *r, float *query, struct part state,
                      int64_t padded)
{
    int64_t count = (r->last - r->first) * r->share;
    for (int64_t i = 0; i < count; i++) {
        int64_t head = r->head * r->share + i % r->share, from = (r->token + i / r->share) * a->query_stride;
        for (int64_t d = 0; d < a->dim; d += LANES)
            _mm512_storeu_ps(query + i * a->dim + d, load(a->query, from + head * a->dim + d, kind));
        state.top[i] = a->sinks ? a->sinks[head] : -INFINITY;
        state.mass[i] = a->sinks ? 1.0f : 0.0f;
    }
    memset(state.out, 0, (size_t)(count * padded) * sizeof(float));
}

INLINE void store_rows(int kind, const struct attention *a, const struct rows *r, struct part state, int64_t padded)
{
    for (int64_t i = 0; i < (r->last - r->first) * r->share; i++) {
        int64_t head = r->head * r->share + i % r->share;
        int64_t to = ((r->token + i / r->share) * a->heads + head) * a->dim;
        for (int64_t d = 0; d < a->dim; d += LANES) {
            __m512 value = _mm512_loadu_ps(state.out + i * padded + d);
            store(a->out, to + d, _mm512_div_ps(value, _mm512_set1_ps(state.mass[i])), kind);
        }
    }
}

/* A unit of a prompt: its rows over all groups they see. */
INLINE void attend_many(int kind, const struct attention *a, struct scratch *s, const struct rows *r)
{
    int64_t count = (r->last - r->first) * r->share;
    int64_t seen_from = at_least(0, r->position - a->window + 1), seen_to = r->position + r->last - r->first;
    int64_t at[2][GROUP], base = seen_from / GROUP * GROUP;
    const int32_t *table = a->tables + r->request * a->table_width;
    load_rows(kind, a, r, s->query, s->state, s->padded);
    locate(a, table, r->head, base, seen_from, seen_to, at[0]);
    for (int turn = 0; base < seen_to; base += GROUP, turn ^= 1) {
        locate(a, table, r->head, base + GROUP, seen_from, seen_to, at[turn ^ 1]);
        take(kind, a, s, at[turn], at[turn ^ 1]);
        multiply(count, s->query, a->dim, s->keys, GROUP, a->dim, s->scores, GROUP);
        for (int64_t i = 0; i < count; i++)
            weigh(a, s, s->part, i, base, r->position + i / r->share);
        for (int64_t d = 0; d < s->padded; d += GROUP)
            multiply(count, s->scores, GROUP, s->values + d, s->padded, GROUP, s->part.out + d, s->padded);
        for (int64_t i = 0; i < count; i++)
            merge(s->state, s->part, i, s->padded);
    }
    store_rows(kind, a, r, s->state, s->padded);
}

/* What the group at `at` adds to up to 8 rows. */
INLINE void add_few(int kind, const struct attention *a, struct scratch *s, const struct rows *r, const float *query,
                    struct part part, int64_t base, const int64_t at[GROUP], const int64_t next[GROUP])
{
    int64_t count = (r->last - r->first) * r->share;
    if (count > 4)
        score_few(kind, 8, a, s, query, at, next);
    else
        score_few(kind, 4, a, s, query, at, next);
    for (int64_t i = 0; i < count; i++)
        weigh(a, s, part, i, base, r->position + i / r->share);
    if (count > 4)
        sum_few(kind, 8, 2, a, s, part.out, at, next);
    else
        sum_few(kind, 4, 4, a, s, part.out, at, next);
}

INLINE struct part part_at(struct part part, int64_t row, int64_t padded)
{
    return (struct part){part.top + row, part.mass + row, part.out + row * padded};
}

/*
 * A unit of a decode: all heads over groups [from, to), 8 rows for each head. The parts go to kept[group][head], or
 * with `kept` null are merged at once, group by group, and the result is stored.
 */
INLINE void attend_few(int kind, const struct attention *a, struct scratch *s, int64_t request, int64_t from,
                       int64_t to, const struct part *kept)
{
    int64_t last = a->query_lens[request], past = a->kv_lens[request] - last;
    int64_t seen_from = at_least(0, past - a->window + 1), seen_to = a->kv_lens[request];
    const int32_t *table = a->tables + request * a->table_width;
    int64_t at[2][GROUP], steps = (to - from) * a->kv_heads;
    for (int64_t head = 0; head < a->kv_heads; head++) {
        struct rows r = rows_of(a, request, head, 0, last);
        load_rows(kind, a, &r, s->query + head * FEW * a->dim, part_at(s->state, head * FEW, s->padded), s->padded);
    }
    locate(a, table, 0, from * GROUP, seen_from, seen_to, at[0]);
    for (int64_t step = 0; step < steps; step++) {
        int64_t group = from + step / a->kv_heads, head = step % a->kv_heads;
        int64_t next_group = from + (step + 1) / a->kv_heads, next_head = (step + 1) % a->kv_heads;
        struct rows r = rows_of(a, request, head, 0, last);
        int64_t to_key = step + 1 < steps ? seen_to : 0; /* nothing is fetched after the last */
        locate(a, table, next_head, next_group * GROUP, seen_from, to_key, at[(step + 1) & 1]);
        struct part part = kept ? part_at(*kept, (group * a->kv_heads + head) * FEW, s->padded) : s->part;
        add_few(kind, a, s, &r, s->query + head * FEW * a->dim, part, group * GROUP, at[step & 1], at[(step + 1) & 1]);
        if (!kept)
            for (int64_t i = 0; i < last * r.share; i++)
                merge(part_at(s->state, head * FEW, s->padded), part, i, s->padded);
    }
    for (int64_t head = 0; head < a->kv_heads && !kept; head++) {
        struct rows r = rows_of(a, request, head, 0, last);
        store_rows(kind, a, &r, part_at(s->state, head * FEW, s->padded), s->padded);
    }
}

/* The end of a decode in several units: its parts [group][head] in ascending order. */
INLINE void merge_kept(int kind, const struct attention *a, struct scratch *s, int64_t request, int64_t head,
                       const struct part *kept, int64_t first_group, int64_t groups)
{
    struct rows r = rows_of(a, request, head, 0, a->query_lens[request]);
    load_rows(kind, a, &r, s->query, s->state, s->padded);
    for (int64_t group = first_group; group < first_group + groups; group++)
        for (int64_t i = 0; i < r.last * r.share; i++)
            merge(s->state, part_at(*kept, (group * a->kv_heads + head) * FEW, s->padded), i, s->padded);
    store_rows(kind, a, &r, s->state, s->padded);
}

/* How one request is cut. */
struct plan {
    int64_t end;                 /* units of the requests up to and with this one */
    int64_t units;               /* of this one */
    int64_t first_group, groups; /* that its rows see; 0 groups: a prompt */
    float *kept;                 /* parts of a decode in several units, else null */
};

/* The kept parts of a decode, so shifted that they are found by the group's number. */
INLINE struct part kept_parts(const struct attention *a, const struct plan *p, int64_t padded)
{
    int64_t rows = p->groups * a->kv_heads * FEW, before = p->first_group * a->kv_heads * FEW;
    float *memory = p->kept;
    return (struct part){memory - before, memory + rows - before, memory + 2 * rows - before * padded};
}

INLINE void run_unit(int kind, const struct attention *a, struct scratch *s, int64_t request, const struct plan *p,
                     int64_t unit, int64_t tokens)
{
    if (p->groups) {
        int64_t from = p->first_group + p->groups * unit / p->units;
        int64_t to = p->first_group + p->groups * (unit + 1) / p->units;
        struct part kept = kept_parts(a, p, s->padded);
        attend_few(kind, a, s, request, from, to, p->kept ? &kept : NULL);
        return;
    }
    int64_t first = unit / a->kv_heads * tokens;
    struct rows r = rows_of(a, request, unit % a->kv_heads, first, at_most(first + tokens, a->query_lens[request]));
    attend_many(kind, a, s, &r);
}

INLINE float *cut(float **memory, int64_t count)
{
    float *piece = *memory;
    *memory += (count + LANES - 1) / LANES * LANES;
    return piece;
}

INLINE struct part cut_part(float **memory, int64_t rows, int64_t padded)
{
    float *top = cut(memory, rows), *mass = cut(memory, rows);
    return (struct part){top, mass, cut(memory, rows * padded)};
}

INLINE int64_t floats_of_part(int64_t rows, int64_t padded) { return rows * (padded + 2) + 2 * LANES; }

/*
 * Cuts all requests; the result is how many floats the kept parts need. Decodes are cut by groups only when there are
 * too few of them to occupy the threads.
 */
static int64_t make_plans(const struct attention *a, int64_t tokens, int64_t padded, int threads, struct plan *plans)
{
    int64_t share = a->heads / a->kv_heads, decodes = 0, end = 0, kept = 0;
    for (int64_t i = 0; i < a->requests; i++)
        decodes += a->query_lens[i] * share <= FEW;
    int64_t wanted = threads == 1 || decodes == 0 ? 1 : (4 * threads + decodes - 1) / decodes; /* units of a decode */
    for (int64_t i = 0; i < a->requests; i++) {
        struct plan *p = plans + i;
        *p = (struct plan){.units = (a->query_lens[i] + tokens - 1) / tokens * a->kv_heads};
        if (a->query_lens[i] * share <= FEW) {
            p->first_group = at_least(0, a->kv_lens[i] - a->query_lens[i] - a->window + 1) / GROUP;
            p->groups = (a->kv_lens[i] + GROUP - 1) / GROUP - p->first_group;
            p->units = at_most(p->groups, wanted);
            kept += p->units > 1 ? floats_of_part(p->groups * a->kv_heads * FEW, padded) : 0;
        }
        p->end = end += p->units;
    }
    return kept;
}

/* All units of all requests; the longest waits come first, so that threads end together. False: out of memory. */
static int run(int kind, const struct attention *a, int threads)
{
    int64_t share = a->heads / a->kv_heads, tokens = at_least(1, QUERIES / share);
    int64_t padded = (a->dim + GROUP - 1) / GROUP * GROUP;
    struct plan *plans = malloc((size_t)a->requests * sizeof *plans);
    int64_t kept = plans ? make_plans(a, tokens, padded, threads, plans) : 0;
    int has_prompts = 0; /* decodes alone lay nothing out and work in a fraction of the memory */
    for (int64_t i = 0; plans && i < a->requests; i++)
        has_prompts |= plans[i].groups == 0;
    int64_t rows = at_least(FEW * a->kv_heads, has_prompts ? tokens * share : 0), laid_out = has_prompts ? GROUP : 0;
    int64_t own = rows * (a->dim + GROUP) + laid_out * (a->dim + padded) + 2 * floats_of_part(rows, padded) + 4 * LANES;
    float *memory = plans ? malloc((size_t)(own * threads + kept) * sizeof(float)) : NULL;
    if (!memory) {
        free(plans);
        return 0;
    }
    float *next = memory + own * threads;
    for (int64_t i = 0; i < a->requests; i++)
        if (plans[i].groups && plans[i].units > 1) {
            plans[i].kept = next;
            next += floats_of_part(plans[i].groups * a->kv_heads * FEW, padded);
        }
#pragma omp parallel num_threads(plans[a->requests - 1].end > 1 ? threads : 1)
    {
        float *mine = memory + omp_get_thread_num() * own;
        memset(mine, 0, (size_t)own * sizeof(float)); /* padding is read */
        struct scratch s = {.padded = padded};
        s.query = cut(&mine, rows * a->dim);
        s.keys = cut(&mine, laid_out * a->dim);
        s.values = cut(&mine, laid_out * padded);
        s.scores = cut(&mine, rows * GROUP);
        s.state = cut_part(&mine, rows, padded);
        s.part = cut_part(&mine, rows, padded);
        int64_t request = a->requests - 1;
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = plans[a->requests - 1].end - 1; u >= 0; u--) {
            while (plans[request].end - plans[request].units > u)
                request--;
            run_unit(kind, a, &s, request, plans + request, u - (plans[request].end - plans[request].units), tokens);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a->requests * a->kv_heads; i++)
            if (plans[i / a->kv_heads].kept) {
                const struct plan *p = plans + i / a->kv_heads;
                const struct part all = kept_parts(a, p, padded);
                merge_kept(kind, a, &s, i / a->kv_heads, i % a->kv_heads, &all, p->first_group, p->groups);
            }
    }
    free(memory);
    free(plans);
    return 1;
}

int pd_attention(int kind, const struct attention *a, int threads)
{
    return kind == FLOAT32 ? run(FLOAT32, a, threads) : run(BFLOAT16, a, threads);
}

/* What attention is asked for: a step's requests and one layer's caches. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct attention {
    const char *query;
    char *k_cache, *v_cache; /* [blocks, block_size, kv_heads, dim] */
    char *out;
    const int32_t *starts, *query_lens, *kv_lens, *tables; /* [requests] each, tables [requests, table_width] */
    const float *sinks;                                    /* [heads], a score that takes weight only; may be null */
    int64_t requests, table_width, block_size, heads, kv_heads, dim, query_stride;
    int64_t window; /* tokens a query sees, itself included */
    float scale;
};

/* The tokens of a step before they are rotated and written; all strides in elements, from token to token. */
struct new_tokens {
    const char *query, *key, *value; /* [tokens, heads, dim] each, a token's heads side by side */
    const char *cos, *sin;           /* [tokens, dim] */
    const int32_t *slots;            /* [tokens], of the cache */
    int64_t tokens, query_stride, key_stride, value_stride;
};

/* False: out of memory. `query` and `out` may be the same memory. */
int pd_attention(int kind, const struct attention *a, int threads);

/* A whole layer in one call: for few tokens, what stands between the kernels costs as much as some of them. */
#include "kernels.h"
#include "vectors.h"

struct dense_layer {
    const void *input_norm, *qkv, *qkv_bias, *o, *o_bias, *mlp_norm, *gate_up, *down; /* biases may be null */
    int64_t hidden, heads, kv_heads, dim, inner;
    int64_t norm_kind, window;
    double eps;
    float scale;
};

/*
 * x and residual [tokens, hidden] are overwritten: in, their sum is the layer's input; out, its output. `tokens` and
 * `step` come without what is the layer's own, but for its caches; `work` has room for tokens * (hidden + inner +
 * (2 * heads + 2 * kv_heads) * dim) elements. False: out of memory.
 */
int pd_dense_layer(int kind, const struct dense_layer *l, const struct new_tokens *tokens, const struct attention *step,
                   void *x, void *residual, void *work, int threads)
{
    int64_t rows = tokens->tokens, bytes = size_of(kind), asked = l->heads * l->dim, kept = l->kv_heads * l->dim;
    int64_t width = asked + 2 * kept;
    char *normed = work, *heads = normed + rows * l->hidden * bytes, *attended = heads + rows * width * bytes;
    char *inner = attended + rows * asked * bytes;
    struct new_tokens n = *tokens;
    n.query = heads, n.key = heads + asked * bytes, n.value = n.key + kept * bytes;
    n.query_stride = n.key_stride = n.value_stride = width;
    struct attention a = *step;
    a.query = a.out = attended, a.query_stride = asked, a.sinks = NULL;
    a.heads = l->heads, a.kv_heads = l->kv_heads, a.dim = l->dim, a.window = l->window, a.scale = l->scale;

    int norm_kind = (int)l->norm_kind;
    pd_add_rms_norm(kind, x, residual, norm_kind, l->input_norm, normed, residual, rows, l->hidden, l->eps, threads);
    pd_linear(kind, normed, l->hidden, l->qkv, l->qkv_bias, heads, rows, l->hidden, width, threads);
    if (!pd_rotate_write_attend(kind, &n, &a, threads))
        return 0;
    pd_linear(kind, attended, asked, l->o, l->o_bias, x, rows, asked, l->hidden, threads);
    pd_add_rms_norm(kind, x, residual, norm_kind, l->mlp_norm, normed, residual, rows, l->hidden, l->eps, threads);
    pd_gated_mlp(kind, normed, l->hidden, l->gate_up, l->down, inner, x, rows, l->hidden, l->inner, l->hidden, threads);
    return 1;
}

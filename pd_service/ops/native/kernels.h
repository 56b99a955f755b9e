/* The kernels that others are made of; what they compute stands where they are defined. */
#pragma once
#include "attention.h"

void pd_linear(int kind, const void *x, int64_t x_stride, const void *weights, const void *bias, void *out,
               int64_t rows, int64_t depth, int64_t width, int threads);
void pd_gated_mlp(int kind, const void *x, int64_t x_stride, const void *gate_up, const void *down, void *inner,
                  void *out, int64_t rows, int64_t depth, int64_t dim, int64_t width, int threads);
void pd_add_rms_norm(int kind, const void *x, const void *residual, int weight_kind, const void *weight, void *normed,
                     void *sum, int64_t rows, int64_t dim, double eps, int threads);
int pd_rotate_write_attend(int kind, const struct new_tokens *n, const struct attention *a, int threads);

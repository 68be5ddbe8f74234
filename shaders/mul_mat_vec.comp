#version 460
#include "common.glsl"
#include "weights.glsl"
#include "bias.glsl"
// Product of a weight matrix with few rows of activations, for decoding: memory-bound, so each weight
// is read once for COLS columns. y[t][r] = bias[r] + sum_k W[r][k] * x[t][k], r < n.
//   dense    t < m, in blocks of COLS
//   GROUPED  pair q < m is its own column: W = table[e], e = ids[q]; x row = q / x_div; y row = q;
//            bias row = e
// A subgroup owns ROWS weight rows; each lane decodes 8 elements at a time, in strides of the subgroup.
// Bindings: 0 x f32[][k], 1 y f32[m][n], 2 ids u32[m] (GROUPED only).
// Specialization: 1 GROUPED, 2 COLS (1..8; 1 if GROUPED), 3 ROWS.
// Grid: x, y folded over blocks of subgroups * ROWS rows; any number of blocks is right, they stride.
// z = blocks of COLS columns, or pairs.
layout(constant_id = 1) const uint GROUPED = 0;
layout(constant_id = 2) const uint COLS = 1;
layout(constant_id = 3) const uint ROWS = 1;
layout(push_constant, scalar) uniform Push {
    uint64_t weights;
    uint64_t table; // u64[n_expert]: addresses of the experts' matrices
    uint64_t bias; // f32[n], or f32[n_expert][n]; 0 = none
    uint k;
    uint n;
    uint m;
    uint x_div;
} p;
layout(binding = 0, scalar) readonly buffer X { float x[]; };
layout(binding = 0, std430) readonly buffer X4 { vec4 x4[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };
layout(binding = 2, scalar) readonly buffer Ids { uint ids[]; };

// Elements k..k+7 of the activations that start at `base`, as whole vectors.
void load_x(uint base, uint k, out float v[8]) {
    vec4 a = x4[(base + k) / 4];
    vec4 b = x4[(base + k) / 4 + 1];
    [[unroll]] for (uint i = 0; i < 4; i++) {
        v[i] = a[i];
        v[i + 4] = b[i];
    }
}

// The same for rows of any length: zeros past the end.
void load_x_ragged(uint base, uint k, out float v[8]) {
    [[unroll]] for (uint i = 0; i < 8; i++) {
        v[i] = k + i < p.k ? x[base + min(k + i, p.k - 1)] : 0.0;
    }
}

void main() {
    uint first_col = GROUPED != 0 ? gl_WorkGroupID.z : gl_WorkGroupID.z * COLS;
    uint expert = GROUPED != 0 ? ids[first_col] : 0;
    uint64_t weights = GROUPED != 0 ? U64s(p.table).u[expert] : p.weights;
    uint x_base[COLS];
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        // Columns past the last repeat it.
        x_base[c] = (GROUPED != 0 ? first_col / p.x_div : min(first_col + c, p.m - 1)) * p.k;
    }
    bool ragged = QUANT_BLOCK == 1 && (p.k & 7) != 0;

    uint stride = gl_NumWorkGroups.x * gl_NumWorkGroups.y * gl_NumSubgroups * ROWS;
    // A subgroup past the last rows repeats them: lavapipe 26.1 runs uniform loads also where no lane is
    // active, and under GPU-assisted validation such a load has no valid address.
    uint last_row = (p.n - 1) / ROWS * ROWS;
    for (uint first_row = min((grid_item() * gl_NumSubgroups + gl_SubgroupID) * ROWS, last_row);
         first_row < p.n; first_row += stride) {
        uint64_t row[ROWS];
        float bias[ROWS];
        float sum[ROWS][COLS];
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            // Rows past the last repeat it.
            uint n = min(first_row + r, p.n - 1);
            row[r] = weights + uint64_t(n) * row_bytes(p.k);
            bias[r] = bias_at(p.bias, expert * p.n + n, weights);
            [[unroll]] for (uint c = 0; c < COLS; c++) {
                sum[r][c] = 0.0;
            }
        }

        for (uint k = gl_SubgroupInvocationID * 8; k < p.k; k += gl_SubgroupSize * 8) {
            float w[ROWS][8];
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                decode8(row[r], k, w[r]);
                if (ragged) {
                    [[unroll]] for (uint i = 0; i < 8; i++) {
                        w[r][i] = k + i < p.k ? w[r][i] : 0.0;
                    }
                }
            }
            [[unroll]] for (uint c = 0; c < COLS; c++) {
                float v[8];
                if (ragged) {
                    load_x_ragged(x_base[c], k, v);
                } else {
                    load_x(x_base[c], k, v);
                }
                [[unroll]] for (uint r = 0; r < ROWS; r++) {
                    [[unroll]] for (uint i = 0; i < 8; i++) {
                        sum[r][c] += w[r][i] * v[i];
                    }
                }
            }
        }

        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            [[unroll]] for (uint c = 0; c < COLS; c++) {
                float total = subgroupAdd(sum[r][c]);
                uint n = first_row + r;
                uint t = first_col + c;
                if (subgroupElect() && n < p.n && t < p.m) {
                    y[t * p.n + n] = total + bias[r];
                }
            }
        }
    }
}

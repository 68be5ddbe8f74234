#version 460
#include "common.glsl"
#include "weights.glsl"
#include "bias.glsl"
// Product of a weight matrix with few rows of activations, for decoding: memory-bound, so each weight
// is read once for COLS columns. y[t][r] = bias[r] + sum_k W[r][k] * x[t][k], r < n.
//   dense    t < m, in blocks of COLS
//   GROUPED  pair q < m is its own column: W = table[e], e = ids[q]; x row = q / x_div; y row = q;
//            bias row = e
// With NORM (see staged_norm.glsl) it is the product with s / rms(s) * norm, s = x (+ delta).
// Bindings: 0 x f32[][k], 1 y f32[m][n], 2 ids u32[m] (GROUPED only), 3 delta and 4 sum f32[m][k] (NORM 2).
// Specialization: 1 GROUPED, 2 COLS (1..8; 1 if GROUPED), 3 ROWS, 4 UNITS, 5 CHUNK (see mat_vec.glsl),
// 6 NORM (k a multiple of 4 then).
// Grid: x, y folded over blocks of subgroups * ROWS rows; any number of blocks is right, they stride.
// z = blocks of COLS columns, or pairs.
layout(constant_id = 1) const uint GROUPED = 0;
layout(constant_id = 2) const uint COLS = 1;
layout(constant_id = 3) const uint ROWS = 1;
layout(constant_id = 4) const uint UNITS = 1;
layout(constant_id = 5) const uint CHUNK = 128;
layout(constant_id = 6) const uint NORM = 0;
layout(push_constant, scalar) uniform Push {
    uint64_t weights;
    uint64_t table; // u64[n_expert]: addresses of the experts' matrices
    uint64_t bias; // f32[n], or f32[n_expert][n]; 0 = none
    uint64_t norm; // f32[k]
    uint k;
    uint n;
    uint m;
    uint x_div;
    float eps;
    uint store_sum;
} p;
layout(binding = 0, scalar) readonly buffer X { float x[]; };
layout(binding = 0, std430) readonly buffer X4 { vec4 x4[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };
layout(binding = 2, scalar) readonly buffer Ids { uint ids[]; };
layout(binding = 3, std430) readonly buffer Delta { vec4 delta4[]; };
layout(binding = 4, std430) writeonly buffer Sum { vec4 sum4[]; };
#include "mat_vec.glsl"
#include "staged_norm.glsl"

uint64_t row[ROWS];
Unit row_unit(uint r, uint u) { return load_unit(row[r], u, p.k); }
uint unit_of_row(uint u) { return u; }

void main() {
    uint first_col = GROUPED != 0 ? gl_WorkGroupID.z : gl_WorkGroupID.z * COLS;
    uint expert = GROUPED != 0 ? ids[first_col] : 0;
    uint64_t weights = GROUPED != 0 ? U64s(p.table).u[expert] : p.weights;
    uint x_row[COLS];
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        // Columns past the last repeat it.
        x_row[c] = GROUPED != 0 ? first_col / p.x_div : min(first_col + c, p.m - 1);
    }
    uint n_units = row_units(p.k);
    uint block_rows = gl_NumSubgroups * ROWS;
    uint n_blocks = (p.n + block_rows - 1) / block_rows;
    uint first_block = min(grid_item(), n_blocks - 1);
    for (uint block = first_block; block < n_blocks; block += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        uint first_row = (block * gl_NumSubgroups + gl_SubgroupID) * ROWS;
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            // Rows past the last repeat it.
            row[r] = weights + uint64_t(min(first_row + r, p.n - 1)) * row_bytes(p.k);
        }
        clear_sums();
        for (uint first = 0; first < n_units; first += CHUNK_UNITS) {
            uint end = min(first + CHUNK_UNITS, n_units);
            load_batch(first, end);
            if (n_units > CHUNK_UNITS || block == first_block) {
                barrier(); // earlier readers of the tile
                stage(first * 32, x_row, block == first_block);
                barrier();
            }
            add_units(first, end);
        }
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            float scale = column_scale(c);
            uint t = first_col + c;
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                uint n = first_row + r;
                float total = scale * subgroupAdd(sums[r][c]);
                total += bias_at(p.bias, expert * p.n + min(n, p.n - 1), weights);
                if (subgroupElect() && n < p.n && t < p.m) {
                    y[t * p.n + n] = total;
                }
            }
        }
    }
}

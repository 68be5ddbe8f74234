#version 460
#include "common.glsl"
#include "weights.glsl"
#include "bias.glsl"
// Products of weight matrices with few rows of activations, for decoding: memory-bound, so each weight
// is read once for COLS columns. y[t][r] = bias[r] + sum_k W[r][k] * x[t][k], r < n.
//   dense    t < m, in blocks of COLS; up to three matrices with a y each
//   GROUPED  pair q < m is its own column: W = table[e], e = ids[q]; x row = q / x_div; y row = q;
//            bias row = e
// With NORM (see staged_norm.glsl) it is the product with s / rms(s) * norm, s = x (+ delta).
// Bindings: 0 x f32[][k], 1 y f32[m][n], 2 ids u32[m] (GROUPED only), 3 delta and 4 sum f32[m][k] (NORM 2),
// 5 and 6 y of the second and third matrix.
// Specialization: 1 GROUPED, 2 COLS (1..8; 1 if GROUPED), 3 ROWS, 4 UNITS, 5 CHUNK (see mat_vec.glsl),
// 6 NORM (k a multiple of 4 then).
// Grid: x, y folded over blocks of subgroups * ROWS rows of a matrix; any number of workgroups is right, they
// stride. z = blocks of COLS columns, or pairs.
layout(constant_id = 1) const uint GROUPED = 0;
layout(constant_id = 2) const uint COLS = 1;
layout(constant_id = 3) const uint ROWS = 1;
layout(constant_id = 4) const uint UNITS = 1;
layout(constant_id = 5) const uint CHUNK = 128;
layout(constant_id = 6) const uint NORM = 0;
layout(push_constant, scalar) uniform Push {
    uint64_t weights;
    uint64_t weights2;
    uint64_t weights3;
    uint64_t table; // u64[n_expert]: addresses of the experts' matrices
    uint64_t bias; // f32[n], or f32[n_expert][n]; 0 = none
    uint64_t bias2;
    uint64_t bias3;
    uint64_t norm; // f32[k]
    uint k;
    uint n;
    uint n2; // 0 = no such matrix
    uint n3;
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
layout(binding = 5, scalar) writeonly buffer Y2 { float y2[]; };
layout(binding = 6, scalar) writeonly buffer Y3 { float y3[]; };
#include "mat_vec.glsl"
#include "staged_norm.glsl"

uint64_t row[ROWS];
Unit row_unit(uint r, uint u) { return load_unit(row[r], u, p.k); }
uint unit_of_row(uint u) { return u; }

// The matrix of a block of rows, and which of its blocks it is.
struct Part {
    uint index;
    uint block;
    uint n;
    uint64_t weights;
    uint64_t bias;
};

uint n_blocks_of(uint n) { return (n + gl_NumSubgroups * ROWS - 1) / (gl_NumSubgroups * ROWS); }

Part part_of(uint block) {
    Part part = Part(0, block, p.n, p.weights, p.bias);
    if (GROUPED == 0 && part.block >= n_blocks_of(p.n)) {
        part = Part(1, part.block - n_blocks_of(p.n), p.n2, p.weights2, p.bias2);
        if (part.block >= n_blocks_of(p.n2)) {
            part = Part(2, part.block - n_blocks_of(p.n2), p.n3, p.weights3, p.bias3);
        }
    }
    return part;
}

void store(uint part, uint at, float value) {
    if (part == 0) {
        y[at] = value;
    } else if (part == 1) {
        y2[at] = value;
    } else {
        y3[at] = value;
    }
}

void main() {
    uint first_col = GROUPED != 0 ? gl_WorkGroupID.z : gl_WorkGroupID.z * COLS;
    uint expert = GROUPED != 0 ? ids[first_col] : 0;
    uint64_t expert_weights = GROUPED != 0 ? U64s(p.table).u[expert] : 0;
    uint x_row[COLS];
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        // Columns past the last repeat it.
        x_row[c] = GROUPED != 0 ? first_col / p.x_div : min(first_col + c, p.m - 1);
    }
    uint n_units = row_units(p.k);
    uint n_blocks = n_blocks_of(p.n) + n_blocks_of(p.n2) + n_blocks_of(p.n3);
    uint first_block = min(grid_item(), n_blocks - 1);
    for (uint block = first_block; block < n_blocks; block += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Part part = part_of(block);
        uint64_t weights = GROUPED != 0 ? expert_weights : part.weights;
        uint first_row = (part.block * gl_NumSubgroups + gl_SubgroupID) * ROWS;
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            // Rows past the last repeat it.
            row[r] = weights + uint64_t(min(first_row + r, part.n - 1)) * row_bytes(p.k);
        }
        clear_sums();
        for (uint first = 0; first < n_units; first += CHUNK_UNITS) {
            uint end = min(first + CHUNK_UNITS, n_units);
            load_first(first, end);
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
                total += bias_at(part.bias, expert * part.n + min(n, part.n - 1), weights);
                if (subgroupElect() && n < part.n && t < p.m) {
                    store(part.index, t * part.n + n, total);
                }
            }
        }
    }
}

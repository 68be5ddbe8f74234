#version 460
#include "common.glsl"
#include "weights.glsl"
#include "glu.glsl"
// The first half of a feed-forward block for few tokens: gate and up with their activation,
//   y[t][r] = glu(sum_k G[r][k] * x[t][k], sum_k U[r][k] * x[t][k]), r < n.
//   dense    t < m, in blocks of COLS
//   GROUPED  pair q < m is its own column: G and U are those of expert ids[q]; x row = q / x_div; y row = q
// U begins at row up_first of its matrix: where both are in one, that is gate's, and up_first n.
// With NORM (see staged_norm.glsl) x is s / rms(s) * norm, s = x (+ delta).
// Bindings: 0 x f32[][k], 1 y f32[m][n], 2 ids u32[m] (GROUPED only), 3 delta and 4 sum f32[m][k] (NORM 2).
// Specialization: 1 GROUPED, 2 COLS (1..8; 1 if GROUPED), 3 ROWS (even: gate, up, gate, ...), 4 UNITS,
// 5 CHUNK (see mat_vec.glsl), 6 NORM (k a multiple of 4 then), 7 OP of glu.glsl.
// Grid: x, y folded over blocks of subgroups * ROWS / 2 rows of y; any number of blocks is right, they
// stride. z = blocks of COLS columns, or pairs.
layout(constant_id = 1) const uint GROUPED = 0;
layout(constant_id = 2) const uint COLS = 1;
layout(constant_id = 3) const uint ROWS = 2;
layout(constant_id = 4) const uint UNITS = 1;
layout(constant_id = 5) const uint CHUNK = 128;
layout(constant_id = 6) const uint NORM = 0;
layout(constant_id = 7) const uint OP = 0;
layout(push_constant, scalar) uniform Push {
    uint64_t gate; // the matrix, or u64[n_expert]: addresses of the experts' matrices
    uint64_t up; // likewise
    uint64_t norm; // f32[k]
    uint k;
    uint n;
    uint m;
    uint x_div;
    uint up_first;
    float eps;
    float alpha;
    float limit;
    uint store_sum;
    uint _pad;
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
    uint64_t gate = GROUPED != 0 ? U64s(p.gate).u[expert] : p.gate;
    uint64_t up = GROUPED != 0 ? U64s(p.up).u[expert] : p.up;
    uint x_row[COLS];
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        // Columns past the last repeat it.
        x_row[c] = GROUPED != 0 ? first_col / p.x_div : min(first_col + c, p.m - 1);
    }
    uint n_units = row_units(p.k);
    uint block_rows = gl_NumSubgroups * (ROWS / 2);
    uint n_blocks = (p.n + block_rows - 1) / block_rows;
    uint first_block = min(grid_item(), n_blocks - 1);
    for (uint block = first_block; block < n_blocks; block += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        uint first_row = (block * gl_NumSubgroups + gl_SubgroupID) * (ROWS / 2);
        [[unroll]] for (uint r = 0; r < ROWS; r += 2) {
            // Rows past the last repeat it.
            uint n = min(first_row + r / 2, p.n - 1);
            row[r] = gate + uint64_t(n) * row_bytes(p.k);
            row[r + 1] = up + uint64_t(n + p.up_first) * row_bytes(p.k);
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
            [[unroll]] for (uint r = 0; r < ROWS; r += 2) {
                float g = scale * subgroupAdd(sums[r][c]);
                float u = scale * subgroupAdd(sums[r + 1][c]);
                uint n = first_row + r / 2;
                if (subgroupElect() && n < p.n && t < p.m) {
                    y[t * p.n + n] = glu(OP, g, u, p.alpha, p.limit);
                }
            }
        }
    }
}

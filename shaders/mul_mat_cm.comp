#version 460
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#include "common.glsl"
#include "weights.glsl"
#include "bias.glsl"
#include "glu.glsl"
// Product of a weight matrix with many rows of activations on matrix units (VK_KHR_cooperative_matrix).
//   dense    y[t][r] = bias[r] + sum_k W[r][k] * x[t][k], r < n, t < m
//   GROUPED  tile j = {expert e, first, count}: its columns are the pairs q = pairs[first..first + count),
//            count <= BN; W = table[e]; x row = q / x_div; y row = q; bias row = e. Expert 0xffffffff:
//            nothing to do.
//   GLU      y = act(G x) * (U x), G = W and U the matrix of weights2 / table2, or with GLU 2 the rows
//            n..2n of W. ACT is that of glu.glsl. Biases: n values of G, then n of U.
// Weights, decoded once, and activations, which come as f16 with a scale a row (half_rows), go to shared
// memory BK elements at a time: the next step's bytes are loaded before this one's products, and decoded
// and stored after them. Sums are f32. Half of the BM rows of a GLU tile are G's, the other half U's.
// A step is BK / 32 units (see weights.glsl) of every row. The elements of a unit lie apart in the row; in
// shared memory they are side by side, for weights and activations alike, so that sums are the same.
// Bindings: 0 x f16[][k], 1 y f32[m][n], 2 pairs u32[], 3 tiles u32[][3] (2, 3: GROUPED only),
//   4 scales f32[] of the rows of x.
// Specialization: 1 GROUPED, 2 GLU (0, 1, 2), 3 ACT, 4 BM, 5 BN, 6 BK (a multiple of 32), 7 WARPS_M,
//   8 WARPS_N: subgroups along rows and columns, 9 MM, 10 MN, 11 MK: the shape of a matrix (MK a multiple
//   of 8). BM / (WARPS_M * MM) is whole, and even for GLU; BN / (WARPS_N * MN) is whole.
//   12 STAGES: 2 buffers in shared memory in turn, or 1 with another barrier.
// k is a multiple of 32. The workgroup is WARPS_M * WARPS_N full subgroups.
// Grid: x = ceil(n / BM), or ceil(n / (BM / 2)) for GLU; y = ceil(m / BN) or number of tiles.
layout(constant_id = 1) const uint GROUPED = 0;
layout(constant_id = 2) const uint GLU = 0;
layout(constant_id = 3) const uint ACT = 0;
layout(constant_id = 4) const uint BM = 64;
layout(constant_id = 5) const uint BN = 64;
layout(constant_id = 6) const uint BK = 32;
layout(constant_id = 7) const uint WARPS_M = 2;
layout(constant_id = 8) const uint WARPS_N = 2;
layout(constant_id = 9) const uint MM = 16;
layout(constant_id = 10) const uint MN = 16;
layout(constant_id = 11) const uint MK = 16;
layout(constant_id = 12) const uint STAGES = 2;
layout(push_constant, scalar) uniform Push {
    uint64_t weights;
    uint64_t table; // u64[n_expert]: addresses of the experts' matrices
    uint64_t weights2; // GLU 1: U
    uint64_t table2;
    uint64_t bias; // f32[n], or f32[n_expert][n], GLU: 2 n instead of n; 0 = none
    uint k;
    uint n;
    uint m;
    uint x_div;
    float alpha; // GLU: as in glu.glsl
    float limit;
} p;
struct Tile {
    uint expert;
    uint first;
    uint count;
};
layout(binding = 0, std430) readonly buffer X { uvec4 x[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };
layout(binding = 1, std430) writeonly buffer Y4 { vec4 y4[]; };
layout(binding = 2, scalar) readonly buffer Pairs { uint pairs[]; };
layout(binding = 3, scalar) readonly buffer Tiles { Tile tiles[]; };
layout(binding = 4, scalar) readonly buffer Scales { float scales[]; };

const uint NOTHING = 0xffffffff;
const uint THREADS = gl_WorkGroupSize.x;

// Matrices of a subgroup, and steps of one of them within BK.
const uint TM = BM / (WARPS_M * MM);
const uint TN = BN / (WARPS_N * MN);
const uint TK = BK / MK;

// Shared memory in quads of words: 8 elements f16. A row has one quad more than its BK elements, so that
// the rows of a matrix begin on different banks.
const uint QUADS = BK / 8;
const uint STRIDE = QUADS + 1;
const uint W_QUADS = BM * STRIDE;
const uint STAGE_QUADS = (BM + BN) * STRIDE;
// After the last step the same memory holds a subgroup's results, f32, column by column.
const uint COL_QUADS = MM / 4 + 1;
const uint OUT_QUADS = MN * COL_QUADS;
const uint ALL_OUT_QUADS = WARPS_M * WARPS_N * OUT_QUADS * TM;
// Rows of matrices of y; the others are U's.
const uint ROWS = GLU != 0 ? TM / 2 : TM;
shared uvec4 tile[STAGES * STAGE_QUADS > ALL_OUT_QUADS ? STAGES * STAGE_QUADS : ALL_OUT_QUADS];
shared uint y_row[BN];
shared uint x_row[BN]; // in quads
shared float x_scale[BN];

// What a thread fetches for a step: units of weights and quads of activations.
const uint ROW_STEP = BK / 32;
const uint W_EACH = (BM * ROW_STEP + THREADS - 1) / THREADS;
const uint X_EACH = (BN * QUADS + THREADS - 1) / THREADS;
uint64_t w_row[W_EACH];
uint x_at[X_EACH];
Unit w_fetched[W_EACH];
uvec4 x_fetched[X_EACH];
uvec4 w_decoded[W_EACH][4];

coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator> sum[TM][TN];

// The first row of G and U that this workgroup has, where they are, and how many rows there are.
uint first_row;
uint64_t gate;
uint64_t up;

void load_columns(uint first, uint count) {
    for (uint c = gl_LocalInvocationID.x; c < BN; c += THREADS) {
        // Columns past the last repeat it.
        uint at = first + min(c, count - 1);
        uint q = GROUPED != 0 ? pairs[at] : at;
        uint row = GROUPED != 0 ? q / p.x_div : q;
        y_row[c] = c < count ? q : NOTHING;
        x_row[c] = row * (p.k / 8);
        x_scale[c] = scales[row];
    }
}

// Address of row r of the tile. Rows past the last repeat it.
uint64_t weight_row(uint r) {
    bool second = GLU != 0 && r >= BM / 2;
    uint n = min(first_row + (second ? r - BM / 2 : r), p.n - 1);
    return (second ? up : gate) + uint64_t(n) * row_bytes(p.k);
}

bool has_weights(uint j) { return W_EACH * THREADS == BM * ROW_STEP || j < BM * ROW_STEP; }

// First of the 8 elements that quad i of unit u holds.
uint quad_element(uint u, uint i) {
    return u / RUNS * (32 * RUNS) + u % RUNS * (32 / RUNS) + i * RUNS / 4 * 32 + i * 8 % (32 / RUNS);
}

// Where this thread's rows are.
void locate_rows() {
    [[unroll]] for (uint i = 0; i < W_EACH; i++) {
        w_row[i] = weight_row((gl_LocalInvocationID.x + i * THREADS) / ROW_STEP);
    }
    [[unroll]] for (uint i = 0; i < X_EACH; i++) {
        x_at[i] = x_row[min((gl_LocalInvocationID.x + i * THREADS) / QUADS, BN - 1)];
    }
}

// Loads what the step from unit u0 of each row on needs, and does nothing else, so that no one waits for it
// here: what is past the end of a row, or of all columns, repeats something before it.
void fetch(uint u0) {
    uint last_unit = row_units(p.k) - 1;
    [[unroll]] for (uint i = 0; i < W_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        if (has_weights(j)) {
            w_fetched[i] = load_unit(w_row[i], min(u0 + j % ROW_STEP, last_unit), p.k);
        }
    }
    [[unroll]] for (uint i = 0; i < X_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        uint e = min(quad_element(u0 + j % QUADS / 4, j % 4), p.k - 8);
        x_fetched[i] = x[x_at[i] + e / 8];
    }
}

// Elements 8 i .. 8 i + 7 of a unit as f16; past the row's end zeros, which meet any activations.
uvec4 decode_quad(Unit w, uint u, uint i) {
    vec2 scale = unit_scale(w, u, i * RUNS / 4);
    vec4 lo = scale.x * unit_q(w, u, 2 * i) + scale.y;
    vec4 hi = scale.x * unit_q(w, u, 2 * i + 1) + scale.y;
    uvec4 quad = uvec4(packHalf2x16(lo.xy), packHalf2x16(lo.zw), packHalf2x16(hi.xy), packHalf2x16(hi.zw));
    return quad_element(u, i) < p.k ? quad : uvec4(0);
}

void decode_fetched(uint u0) {
    [[unroll]] for (uint i = 0; i < W_EACH; i++) {
        [[unroll]] for (uint q = 0; q < 4; q++) {
            uint j = gl_LocalInvocationID.x + i * THREADS;
            w_decoded[i][q] = decode_quad(w_fetched[i], u0 + j % ROW_STEP, q);
        }
    }
}

void store_fetched(uint stage) {
    [[unroll]] for (uint i = 0; i < W_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        if (has_weights(j)) {
            uint to = stage * STAGE_QUADS + j / ROW_STEP * STRIDE + j % ROW_STEP * 4;
            [[unroll]] for (uint q = 0; q < 4; q++) {
                tile[to + q] = w_decoded[i][q];
            }
        }
    }
    [[unroll]] for (uint i = 0; i < X_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        if (j < BN * QUADS) {
            tile[stage * STAGE_QUADS + W_QUADS + j / QUADS * STRIDE + j % QUADS] = x_fetched[i];
        }
    }
}

// Row of the tile at which matrix i of a subgroup begins: of a GLU tile the first half is G's, the second
// the same rows of U.
uint matrix_row(uint warp_m, uint i) {
    if (GLU != 0) {
        return (i / (TM / 2)) * (BM / 2) + (warp_m * (TM / 2) + i % (TM / 2)) * MM;
    }
    return (warp_m * TM + i) * MM;
}

// Column at which matrix j of a subgroup begins: dealt out in turn, so that tiles with few columns keep
// all subgroups busy.
uint matrix_column(uint warp_n, uint j) { return (j * WARPS_N + warp_n) * MN; }

// Adds the products of a step with the first n of the subgroup's columns of matrices.
void multiply(uint w_at, uint n, uint warp_m, uint warp_n) {
    [[unroll]] for (uint kk = 0; kk < TK; kk++) {
        coopmat<float16_t, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA> w[TM];
        [[unroll]] for (uint i = 0; i < TM; i++) {
            coopMatLoad(w[i], tile, w_at + matrix_row(warp_m, i) * STRIDE + kk * (MK / 8), STRIDE,
                gl_CooperativeMatrixLayoutRowMajor);
        }
        [[unroll]] for (uint j = 0; j < n; j++) {
            coopmat<float16_t, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB> v;
            coopMatLoad(v, tile, w_at + W_QUADS + matrix_column(warp_n, j) * STRIDE + kk * (MK / 8), STRIDE,
                gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint i = 0; i < TM; i++) {
                sum[i][j] = coopMatMulAdd(w[i], v, sum[i][j]);
            }
        }
    }
}

// All steps, with the first n of each subgroup's columns of matrices; n is a constant.
void multiply_all(uint n, uint warp_m, uint warp_n) {
    uint stage = 0;
    uint n_units = row_units(p.k);
    for (uint u0 = 0; u0 < n_units; u0 += ROW_STEP) {
        uint next = u0 + ROW_STEP;
        fetch(next);
        multiply(stage * STAGE_QUADS, n, warp_m, warp_n);
        decode_fetched(next);
        if (STAGES == 1) {
            barrier();
        }
        if (next < n_units) {
            stage = (stage + 1) % STAGES;
            store_fetched(stage);
        }
        barrier();
    }
}

float bias_of(uint expert, uint half_index, uint n) {
    uint width = GLU != 0 ? 2 * p.n : p.n;
    return bias_at(p.bias, expert * width + half_index * p.n + n, gate);
}

// Writes the MM rows from `row` on of MN columns from `column` on, whose sums are in shared memory from `at`
// on; for GLU those of U are ROWS matrices behind.
void store_results(uint at, uint expert, uint row, uint column) {
    const uint COL_SUMS = MM / 4;
    for (uint i = gl_SubgroupInvocationID; i < MN * COL_SUMS; i += gl_SubgroupSize) {
        uint c = column + i / COL_SUMS;
        uint n = row + i % COL_SUMS * 4;
        uint q = y_row[c];
        if (q == NOTHING || n >= p.n) {
            continue;
        }
        uint unit = at + i / COL_SUMS * COL_QUADS + i % COL_SUMS;
        vec4 sum = uintBitsToFloat(tile[unit]) * x_scale[c];
        vec4 second = GLU != 0 ? uintBitsToFloat(tile[unit + ROWS * OUT_QUADS]) * x_scale[c] : vec4(0.0);
        [[unroll]] for (uint r = 0; r < 4; r++) {
            uint known = min(n + r, p.n - 1);
            sum[r] += bias_of(expert, 0, known);
            if (GLU != 0) {
                second[r] += bias_of(expert, 1, known);
                sum[r] = glu(ACT, sum[r], second[r], p.alpha, p.limit);
            }
        }
        if ((p.n & 3) == 0) {
            y4[(q * p.n + n) / 4] = sum;
        } else {
            [[unroll]] for (uint r = 0; r < 4; r++) {
                if (n + r < p.n) {
                    y[q * p.n + n + r] = sum[r];
                }
            }
        }
    }
}

void main() {
    uint first = gl_WorkGroupID.y * BN;
    uint count = min(p.m - first, BN);
    uint expert = 0;
    gate = p.weights;
    up = p.weights2;
    if (GROUPED != 0) {
        Tile tile = tiles[gl_WorkGroupID.y];
        if (tile.expert == NOTHING) {
            return;
        }
        first = tile.first;
        count = tile.count;
        expert = tile.expert;
        gate = U64s(p.table).u[expert];
        if (GLU == 1) {
            up = U64s(p.table2).u[expert];
        }
    }
    if (GLU == 2) {
        up = gate + uint64_t(p.n) * row_bytes(p.k);
    }
    first_row = gl_WorkGroupID.x * (GLU != 0 ? BM / 2 : BM);
    load_columns(first, count);
    barrier();

    // Columns with something in them, as whole matrices.
    uint n_columns = (count + MN - 1) / MN * MN;
    uint warp_m = gl_SubgroupID / WARPS_N;
    uint warp_n = gl_SubgroupID % WARPS_N;
    [[unroll]] for (uint i = 0; i < TM; i++) {
        [[unroll]] for (uint j = 0; j < TN; j++) {
            sum[i][j] = coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>(0.0);
        }
    }

    locate_rows();
    fetch(0);
    decode_fetched(0);
    store_fetched(0);
    barrier();
    // Lists often end in tiles with few columns. The branch is around all steps: within them it would keep
    // loads from running ahead of products.
    uint n_active = (n_columns / MN + WARPS_N - 1) / WARPS_N;
    if (GROUPED != 0 && TN >= 4 && n_active <= TN / 4) {
        multiply_all(TN / 4, warp_m, warp_n);
    } else if (GROUPED != 0 && TN >= 2 && n_active <= TN / 2) {
        multiply_all(TN / 2, warp_m, warp_n);
    } else {
        multiply_all(TN, warp_m, warp_n);
    }

    // Column by column of matrices. Only the stores of matrices are unrolled: with all of it unrolled, the
    // sums would be indexed at run time by compilers that find that too long, and live in memory.
    uint at = gl_SubgroupID * OUT_QUADS * TM;
    [[dont_unroll]] for (uint j = 0; j < TN; j++) {
        // The same for all subgroups: lavapipe takes subgroupBarrier for one of the workgroup.
        if (j * WARPS_N * MN >= n_columns) {
            break;
        }
        [[unroll]] for (uint known = 0; known < TN; known++) {
            if (known == j) {
                [[unroll]] for (uint i = 0; i < TM; i++) {
                    coopMatStore(sum[i][known], tile, at + i * OUT_QUADS, COL_QUADS,
                        gl_CooperativeMatrixLayoutColumnMajor);
                }
            }
        }
        subgroupBarrier();
        [[dont_unroll]] for (uint i = 0; i < ROWS; i++) {
            store_results(at + i * OUT_QUADS, expert, first_row + matrix_row(warp_m, i), matrix_column(warp_n, j));
        }
        subgroupBarrier();
    }
}

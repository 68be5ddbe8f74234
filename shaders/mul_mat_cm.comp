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
// memory BK elements at a time, in two buffers in turn: the next step's are fetched while this one's are
// multiplied. Sums are f32. Half of the BM rows of a GLU tile are G's, the other half U's.
// Bindings: 0 x f16[][k], 1 y f32[m][n], 2 pairs u32[], 3 tiles u32[][3] (2, 3: GROUPED only),
//   4 scales f32[] of the rows of x.
// Specialization: 1 GROUPED, 2 GLU (0, 1, 2), 3 ACT, 4 BM, 5 BN, 6 BK (a multiple of 32), 7 WARPS_M,
//   8 WARPS_N: subgroups along rows and columns, 9 MM, 10 MN, 11 MK: the shape of a matrix (MK a multiple
//   of 8). BM / (WARPS_M * MM) is whole, and even for GLU; BN / (WARPS_N * MN) is whole.
//   12 FETCH_AHEAD: the next step's fetches come before the products, else after.
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
layout(constant_id = 12) const uint FETCH_AHEAD = 1;
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

// Shared memory in units of 16 bytes: 8 elements f16. A row has one unit more than its BK elements, so
// that the rows of a matrix begin on different banks.
const uint UNITS = BK / 8;
const uint STRIDE = UNITS + 1;
const uint W_UNITS = BM * STRIDE;
const uint STAGE_UNITS = (BM + BN) * STRIDE;
// After the last step the same memory holds a subgroup's results, f32, column by column.
const uint COL_UNITS = MM / 4 + 1;
const uint OUT_UNITS = MN * COL_UNITS;
const uint ALL_OUT_UNITS = WARPS_M * WARPS_N * OUT_UNITS * TM;
// Rows of matrices of y; the others are U's.
const uint ROWS = GLU != 0 ? TM / 2 : TM;
shared uvec4 tile_units[2 * STAGE_UNITS > ALL_OUT_UNITS ? 2 * STAGE_UNITS : ALL_OUT_UNITS];
shared uint y_row[BN];
shared uint x_row[BN]; // in units
shared float x_scale[BN];

// What a thread fetches for a step: units of weights and of activations.
const uint W_EACH = (BM * UNITS + THREADS - 1) / THREADS;
const uint X_EACH = (BN * UNITS + THREADS - 1) / THREADS;
uvec4 w_fetched[W_EACH];
uvec4 x_fetched[X_EACH];

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

void fetch(uint k0, uint n_columns) {
    [[unroll]] for (uint i = 0; i < W_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        if (W_EACH * THREADS == BM * UNITS || j < BM * UNITS) {
            uint k = k0 + j % UNITS * 8;
            float w[8] = float[8](0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
            if (k < p.k) {
                decode8(weight_row(j / UNITS), k, w);
            }
            w_fetched[i] = uvec4(packHalf2x16(vec2(w[0], w[1])), packHalf2x16(vec2(w[2], w[3])),
                packHalf2x16(vec2(w[4], w[5])), packHalf2x16(vec2(w[6], w[7])));
        }
    }
    [[unroll]] for (uint i = 0; i < X_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        if (j / UNITS < n_columns) {
            // Elements past the end of a row meet zeros, but must not be NaN.
            uint unit = k0 / 8 + j % UNITS;
            x_fetched[i] = unit < p.k / 8 ? x[x_row[j / UNITS] + unit] : uvec4(0);
        }
    }
}

void store_fetched(uint stage, uint n_columns) {
    [[unroll]] for (uint i = 0; i < W_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        if (W_EACH * THREADS == BM * UNITS || j < BM * UNITS) {
            tile_units[stage * STAGE_UNITS + j / UNITS * STRIDE + j % UNITS] = w_fetched[i];
        }
    }
    [[unroll]] for (uint i = 0; i < X_EACH; i++) {
        uint j = gl_LocalInvocationID.x + i * THREADS;
        if (j / UNITS < n_columns) {
            tile_units[stage * STAGE_UNITS + W_UNITS + j / UNITS * STRIDE + j % UNITS] = x_fetched[i];
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

float bias_of(uint expert, uint half_index, uint n) {
    uint width = GLU != 0 ? 2 * p.n : p.n;
    return bias_at(p.bias, expert * width + half_index * p.n + n, gate);
}

// Writes the MM rows from `row` on of MN columns from `column` on, whose sums are in shared memory from `at`
// on; for GLU those of U are ROWS matrices behind.
void store_results(uint at, uint expert, uint row, uint column) {
    const uint QUADS = MM / 4;
    for (uint i = gl_SubgroupInvocationID; i < MN * QUADS; i += gl_SubgroupSize) {
        uint c = column + i / QUADS;
        uint n = row + i % QUADS * 4;
        uint q = y_row[c];
        if (q == NOTHING || n >= p.n) {
            continue;
        }
        uint unit = at + i / QUADS * COL_UNITS + i % QUADS;
        vec4 sum = uintBitsToFloat(tile_units[unit]) * x_scale[c];
        vec4 second = GLU != 0 ? uintBitsToFloat(tile_units[unit + ROWS * OUT_UNITS]) * x_scale[c] : vec4(0.0);
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
    coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator> sum[TM][TN];
    [[unroll]] for (uint i = 0; i < TM; i++) {
        [[unroll]] for (uint j = 0; j < TN; j++) {
            sum[i][j] = coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>(0.0);
        }
    }

    fetch(0, n_columns);
    store_fetched(0, n_columns);
    barrier();
    uint stage = 0;
    for (uint k0 = 0; k0 < p.k; k0 += BK) {
        bool more = k0 + BK < p.k;
        if (FETCH_AHEAD != 0 && more) {
            fetch(k0 + BK, n_columns);
        }
        [[unroll]] for (uint kk = 0; kk < TK; kk++) {
            coopmat<float16_t, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA> w[TM];
            [[unroll]] for (uint i = 0; i < TM; i++) {
                coopMatLoad(w[i], tile_units, stage * STAGE_UNITS + matrix_row(warp_m, i) * STRIDE + kk * (MK / 8),
                    STRIDE, gl_CooperativeMatrixLayoutRowMajor);
            }
            [[unroll]] for (uint j = 0; j < TN; j++) {
                if (matrix_column(warp_n, j) < n_columns) {
                    coopmat<float16_t, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB> v;
                    coopMatLoad(v, tile_units,
                        stage * STAGE_UNITS + W_UNITS + matrix_column(warp_n, j) * STRIDE + kk * (MK / 8), STRIDE,
                        gl_CooperativeMatrixLayoutColumnMajor);
                    [[unroll]] for (uint i = 0; i < TM; i++) {
                        sum[i][j] = coopMatMulAdd(w[i], v, sum[i][j]);
                    }
                }
            }
        }
        if (more) {
            if (FETCH_AHEAD == 0) {
                fetch(k0 + BK, n_columns);
            }
            stage ^= 1;
            store_fetched(stage, n_columns);
        }
        barrier();
    }

    // Column by column of matrices. Only the stores of matrices are unrolled: with all of it unrolled, the
    // sums would be indexed at run time by compilers that find that too long, and live in memory.
    uint at = gl_SubgroupID * OUT_UNITS * TM;
    [[dont_unroll]] for (uint j = 0; j < TN; j++) {
        // The same for all subgroups: lavapipe takes subgroupBarrier for one of the workgroup.
        if (j * WARPS_N * MN >= n_columns) {
            break;
        }
        [[unroll]] for (uint known = 0; known < TN; known++) {
            if (known == j) {
                [[unroll]] for (uint i = 0; i < TM; i++) {
                    coopMatStore(sum[i][known], tile_units, at + i * OUT_UNITS, COL_UNITS,
                        gl_CooperativeMatrixLayoutColumnMajor);
                }
            }
        }
        subgroupBarrier();
        [[dont_unroll]] for (uint i = 0; i < ROWS; i++) {
            store_results(at + i * OUT_UNITS, expert, first_row + matrix_row(warp_m, i), matrix_column(warp_n, j));
        }
        subgroupBarrier();
    }
}

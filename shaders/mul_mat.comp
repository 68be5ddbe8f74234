#version 460
#include "common.glsl"
#include "weights.glsl"
#include "bias.glsl"
// Product of a weight matrix with many rows of activations, for prefill.
//   dense    y[t][r] = bias[r] + sum_k W[r][k] * x[t][k], r < n, t < m
//   GROUPED  tile j = {expert e, first, count}: its columns are the pairs q = pairs[first..first + count),
//            count <= BN; W = table[e]; x row = q / x_div; y row = q; bias row = e. Expert 0xffffffff:
//            nothing to do.
// A workgroup computes BM rows by BN columns. Steps of BK elements: weights, decoded once, and
// activations go to shared memory; each invocation then adds to its own TM x TN sums.
// Bindings: 0 x f32[][k], 1 y f32[m][n], 2 pairs u32[], 3 tiles u32[][3] (2, 3: GROUPED only).
// Specialization: 1 GROUPED, 2 BM, 3 BN, 4 BK (a multiple of 8), 5 TM, 6 TN. The workgroup has
// BM / TM * (BN / TN) invocations. Shared memory: 4 * (BK * (BM + BN + 2) + BN) bytes.
// Grid: x = ceil(n / BM), y = ceil(m / BN) or number of tiles.
layout(constant_id = 1) const uint GROUPED = 0;
layout(constant_id = 2) const uint BM = 64;
layout(constant_id = 3) const uint BN = 32;
layout(constant_id = 4) const uint BK = 32;
layout(constant_id = 5) const uint TM = 4;
layout(constant_id = 6) const uint TN = 4;
layout(push_constant, scalar) uniform Push {
    uint64_t weights;
    uint64_t table; // u64[n_expert]: addresses of the experts' matrices
    uint64_t bias; // f32[n], or f32[n_expert][n]; 0 = none
    uint k;
    uint n;
    uint m;
    uint x_div;
} p;
struct Tile {
    uint expert;
    uint first;
    uint count;
};
layout(binding = 0, scalar) readonly buffer X { float x[]; };
layout(binding = 0, std430) readonly buffer X4 { vec4 x4[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };
layout(binding = 2, scalar) readonly buffer Pairs { uint pairs[]; };
layout(binding = 3, scalar) readonly buffer Tiles { Tile tiles[]; };

// One column more than needed: invocations that store neighbouring k hit different banks.
shared float w_tile[BK][BM + 1];
shared float x_tile[BK][BN + 1];
// The tile's rows of y; those past its end are 0xffffffff.
shared uint y_row[BN];

const uint NOTHING = 0xffffffff;

void load_y_rows(uint first, uint count) {
    for (uint c = gl_LocalInvocationID.x; c < BN; c += gl_WorkGroupSize.x) {
        y_row[c] = c >= count ? NOTHING : GROUPED != 0 ? pairs[first + c] : first + c;
    }
}

void load_weights(uint64_t weights, uint first_row, uint k0) {
    for (uint j = gl_LocalInvocationID.x; j < BM * BK / 8; j += gl_WorkGroupSize.x) {
        uint kk = j % (BK / 8) * 8;
        uint r = j / (BK / 8);
        uint k = k0 + kk;
        float w[8] = float[8](0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
        if (k < p.k && first_row + r < p.n) {
            decode8(weights + uint64_t(first_row + r) * row_bytes(p.k), k, w);
        }
        [[unroll]] for (uint i = 0; i < 8; i++) {
            w_tile[kk + i][r] = QUANT_BLOCK > 1 || k + i < p.k ? w[i] : 0.0;
        }
    }
}

void load_activations(uint k0) {
    for (uint j = gl_LocalInvocationID.x; j < BN * BK / 4; j += gl_WorkGroupSize.x) {
        uint kk = j % (BK / 4) * 4;
        uint c = j / (BK / 4);
        uint k = k0 + kk;
        uint q = y_row[c];
        uint base = (GROUPED != 0 ? q / p.x_div : q) * p.k + k;
        vec4 v = vec4(0.0);
        if (q != NOTHING) {
            if (QUANT_BLOCK > 1 || (p.k & 3) == 0) {
                if (k < p.k) {
                    v = x4[base / 4];
                }
            } else {
                [[unroll]] for (uint i = 0; i < 4; i++) {
                    if (k + i < p.k) {
                        v[i] = x[base + i];
                    }
                }
            }
        }
        [[unroll]] for (uint i = 0; i < 4; i++) {
            x_tile[kk + i][c] = v[i];
        }
    }
}

void main() {
    uint first = gl_WorkGroupID.y * BN;
    uint count = p.m - first;
    uint expert = 0;
    uint64_t weights = p.weights;
    if (GROUPED != 0) {
        Tile tile = tiles[gl_WorkGroupID.y];
        if (tile.expert == NOTHING) {
            return;
        }
        first = tile.first;
        count = tile.count;
        expert = tile.expert;
        weights = U64s(p.table).u[expert];
    }
    load_y_rows(first, count);
    barrier();

    // An invocation's rows and columns are interleaved with its neighbours'.
    const uint ROW_STEP = BM / TM;
    const uint COL_STEP = BN / TN;
    uint row = gl_LocalInvocationID.x % ROW_STEP;
    uint col = gl_LocalInvocationID.x / ROW_STEP;
    uint first_row = gl_WorkGroupID.x * BM;
    float sum[TM][TN];
    [[unroll]] for (uint r = 0; r < TM; r++) {
        [[unroll]] for (uint c = 0; c < TN; c++) {
            sum[r][c] = 0.0;
        }
    }

    for (uint k0 = 0; k0 < p.k; k0 += BK) {
        load_weights(weights, first_row, k0);
        load_activations(k0);
        barrier();
        for (uint kk = 0; kk < BK; kk++) {
            float w[TM];
            [[unroll]] for (uint r = 0; r < TM; r++) {
                w[r] = w_tile[kk][row + r * ROW_STEP];
            }
            [[unroll]] for (uint c = 0; c < TN; c++) {
                float v = x_tile[kk][col + c * COL_STEP];
                [[unroll]] for (uint r = 0; r < TM; r++) {
                    sum[r][c] += w[r] * v;
                }
            }
        }
        barrier();
    }

    [[unroll]] for (uint r = 0; r < TM; r++) {
        uint n = first_row + row + r * ROW_STEP;
        float bias = bias_at(p.bias, expert * p.n + min(n, p.n - 1), weights);
        [[unroll]] for (uint c = 0; c < TN; c++) {
            uint q = y_row[col + c * COL_STEP];
            if (q != NOTHING && n < p.n) {
                y[q * p.n + n] = sum[r][c] + bias;
            }
        }
    }
}

#version 460
#define QUANT_AS_BYTES
#include "common.glsl"
#include "weights.glsl"
#include "bias.glsl"
// Product of a weight matrix with many rows of activations by packed integer dot products, for devices
// without matrix units.
//   dense    y[t][r] = bias[r] + sum_k W[r][k] * x[t][k], r < n, t < m
//   GROUPED  tile j = {expert e, first, count}: its columns are the pairs q = pairs[first..first + count),
//            count <= BN; W = table[e]; x row = q / x_div; y row = q; bias row = e. Expert 0xffffffff:
//            nothing to do.
// Weights and activations (int8_rows) are bytes times a scale that QUANT_GROUP of them share, weights also
// plus a minimum: of a group, sum w x = a d (q . p) + b d (sum p), where w = a q + b and x = d p. A
// workgroup computes BM rows by BN columns. Steps of BK elements go to shared memory, weights decoded once;
// each invocation then adds to its own TM x TN sums.
// Bindings: 0 x i8[][k], 1 y f32[m][n], 2 pairs u32[], 3 tiles u32[][3] (2, 3: GROUPED only),
//   4 scales f32[][k / 32] of x.
// Specialization: 1 GROUPED, 2 BM, 3 BN, 4 BK (a multiple of 32), 5 TM, 6 TN. The workgroup has
// BM / TM * (BN / TN) invocations. Shared memory: 16 * BK / 16 * (BM + BN + 2), for the scales and minima
// 8 * BK / 16 * (BM + BN) at most, and 4 * BN bytes.
// Grid: x = ceil(n / BM), y = ceil(m / BN) or number of tiles.
layout(constant_id = 1) const uint GROUPED = 0;
layout(constant_id = 2) const uint BM = 64;
layout(constant_id = 3) const uint BN = 64;
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
layout(binding = 0, std430) readonly buffer X { uvec4 x[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };
layout(binding = 2, scalar) readonly buffer Pairs { uint pairs[]; };
layout(binding = 3, scalar) readonly buffer Tiles { Tile tiles[]; };
layout(binding = 4, scalar) readonly buffer Scales { float scales[]; };

const uint NOTHING = 0xffffffff;
const uint UNITS = BK / 16; // of 16 elements, one load of shared memory
const uint GROUPS = BK / QUANT_GROUP;
const uint GROUP_UNITS = QUANT_GROUP / 16;
const uint MIN_GROUPS = QUANT_HAS_MIN ? GROUPS : 1;

// Neighbouring invocations read neighbouring rows or columns. One more than needed: those that store
// neighbouring units hit different banks.
shared uvec4 w_tile[UNITS][BM + 1];
shared float w_scale[GROUPS][BM];
shared float w_min[MIN_GROUPS][BM];
shared uvec4 x_tile[UNITS][BN + 1];
shared float x_scale[BK / 32][BN];
shared float x_sum[MIN_GROUPS][BN]; // of a group, with its scale
// The tile's rows of y; those past its end are 0xffffffff.
shared uint y_row[BN];

void load_y_rows(uint first, uint count) {
    for (uint c = gl_LocalInvocationID.x; c < BN; c += gl_WorkGroupSize.x) {
        y_row[c] = c >= count ? NOTHING : GROUPED != 0 ? pairs[first + c] : first + c;
    }
}

// Rows and elements past the last repeat it; elements count for nothing.
void load_weights(uint64_t weights, uint first_row, uint k0) {
    for (uint j = gl_LocalInvocationID.x; j < BM * UNITS; j += gl_WorkGroupSize.x) {
        uint unit = j % UNITS;
        uint r = j / UNITS;
        uint k = k0 + unit * 16;
        uvec4 q;
        vec2 scale;
        decode_bytes16(weights + uint64_t(min(first_row + r, p.n - 1)) * row_bytes(p.k), min(k, p.k - 16), q, scale);
        w_tile[unit][r] = q;
        if (unit % GROUP_UNITS == 0) {
            w_scale[unit / GROUP_UNITS][r] = k < p.k ? scale.x : 0.0;
            if (QUANT_HAS_MIN) {
                w_min[unit / GROUP_UNITS][r] = k < p.k ? scale.y : 0.0;
            }
        }
    }
}

int dot16(uvec4 a, uvec4 b) {
    return dotPacked4x8EXT(int(a.x), int(b.x)) + dotPacked4x8EXT(int(a.y), int(b.y))
        + dotPacked4x8EXT(int(a.z), int(b.z)) + dotPacked4x8EXT(int(a.w), int(b.w));
}

void load_activations(uint k0) {
    for (uint j = gl_LocalInvocationID.x; j < BN * (BK / 32); j += gl_WorkGroupSize.x) {
        uint block = j % (BK / 32);
        uint c = j / (BK / 32);
        uint q = y_row[c];
        bool known = q != NOTHING && k0 + block * 32 < p.k;
        uint row = known ? (GROUPED != 0 ? q / p.x_div : q) : 0;
        uint at = row * (p.k / 32) + (known ? k0 / 32 + block : 0);
        uvec4 lo = x[at * 2];
        uvec4 hi = x[at * 2 + 1];
        float scale = known ? scales[at] : 0.0;
        x_tile[block * 2][c] = lo;
        x_tile[block * 2 + 1][c] = hi;
        x_scale[block][c] = scale;
        if (QUANT_HAS_MIN) {
            int lo_sum = dot16(lo, uvec4(0x01010101));
            int hi_sum = dot16(hi, uvec4(0x01010101));
            if (GROUP_UNITS == 2) {
                x_sum[block][c] = scale * float(lo_sum + hi_sum);
            } else {
                x_sum[block * 2][c] = scale * float(lo_sum);
                x_sum[block * 2 + 1][c] = scale * float(hi_sum);
            }
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
        for (uint g = 0; g < GROUPS; g++) {
            uvec4 w[TM][GROUP_UNITS];
            float a[TM];
            float b[TM];
            [[unroll]] for (uint r = 0; r < TM; r++) {
                [[unroll]] for (uint u = 0; u < GROUP_UNITS; u++) {
                    w[r][u] = w_tile[g * GROUP_UNITS + u][row + r * ROW_STEP];
                }
                a[r] = w_scale[g][row + r * ROW_STEP];
                b[r] = QUANT_HAS_MIN ? w_min[g][row + r * ROW_STEP] : 0.0;
            }
            [[unroll]] for (uint c = 0; c < TN; c++) {
                uint column = col + c * COL_STEP;
                uvec4 v[GROUP_UNITS];
                [[unroll]] for (uint u = 0; u < GROUP_UNITS; u++) {
                    v[u] = x_tile[g * GROUP_UNITS + u][column];
                }
                float d = x_scale[g * GROUP_UNITS / 2][column];
                float s = QUANT_HAS_MIN ? x_sum[g][column] : 0.0;
                [[unroll]] for (uint r = 0; r < TM; r++) {
                    int dot = 0;
                    [[unroll]] for (uint u = 0; u < GROUP_UNITS; u++) {
                        dot += dot16(w[r][u], v[u]);
                    }
                    sum[r][c] += float(dot) * (a[r] * d);
                    if (QUANT_HAS_MIN) {
                        sum[r][c] += b[r] * s;
                    }
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

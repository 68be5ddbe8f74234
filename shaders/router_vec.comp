#version 460
#include "common.glsl"
#include "weights.glsl"
#include "order_key.glsl"
// A layer's second norm, its router and the choice of experts for few tokens:
//   s = x (+ delta), normed = s / rms(s) * norm, logits = W normed; then the choice, see choose.glsl.
// The threads of a workgroup share the elements of ROWS weight rows, so that all loads are on their way at
// once; sums of squares come out of the same loop, and the workgroups together store s and normed, each a
// share. The last to finish makes the choice.
// Bindings: 0 x [n_tokens][k], 1 delta likewise, 2 sum likewise (1, 2: HAS_DELTA only), 3 normed likewise,
// 4 logits [n_tokens][n_expert], 5 ids u32[n_tokens][n_used], 6 weights likewise, 7 status: 0 or the layer
// with a NaN + 1, then counters.
// Specialization: 1 ROWS, 2 COLS, 3 HAS_DELTA, 4 GATING, 5 NORM_WEIGHTS, 6 HAS_BIAS (see choose.glsl).
// k is a multiple of 8.
// Grid: x = ceil(n_expert / ROWS), y = blocks of COLS tokens, which have a counter each.
layout(constant_id = 1) const uint ROWS = 1;
layout(constant_id = 2) const uint COLS = 1;
layout(constant_id = 3) const bool HAS_DELTA = true;
layout(constant_id = 4) const uint GATING = 0;
layout(constant_id = 5) const bool NORM_WEIGHTS = false;
layout(constant_id = 6) const bool HAS_BIAS = false;
layout(push_constant, scalar) uniform Push {
    uint64_t matrix;
    uint64_t norm; // f32[k]
    uint64_t bias; // f32[n_expert]; 0 = none
    uint k;
    uint n_tokens;
    uint n_expert; // <= MAX_EXPERTS
    uint n_used;
    uint n_group; // 0 or 1 = no groups
    uint n_group_used;
    uint il; // the layer, for status
    float eps;
    float scale;
    float norm_min;
} p;
layout(binding = 0, std430) readonly buffer X { vec4 x4[]; };
layout(binding = 1, std430) readonly buffer Delta { vec4 delta4[]; };
layout(binding = 2, std430) writeonly buffer Sum { vec4 sum4[]; };
layout(binding = 3, std430) writeonly buffer Normed { vec4 normed4[]; };
layout(binding = 4, scalar) coherent buffer Logits { float logits[]; };
layout(binding = 5, scalar) writeonly buffer Ids { uint ids[]; };
layout(binding = 6, scalar) writeonly buffer Weights { float weights[]; };
layout(binding = 7, scalar) coherent buffer Status { uint status[]; };
#include "last_group.glsl"
#include "choose.glsl"

// Sums by subgroup: ROWS * COLS products, then COLS squares.
const uint SUMS = ROWS * COLS + COLS;
shared float parts[SUMS * gl_WorkGroupSize.x / 4];

float whole(uint i) {
    float sum = 0.0;
    for (uint s = 0; s < gl_NumSubgroups; s++) {
        sum += parts[i * gl_NumSubgroups + s];
    }
    return sum;
}

// Vector i of s of a token.
vec4 load_s(uint token, uint i) {
    uint at = token * (p.k / 4) + i;
    return HAS_DELTA ? x4[at] + delta4[at] : x4[at];
}

vec4 load_norm(uint i) { return F32x4(p.norm + i * 16).f; }

// Tokens past the last repeat it.
uint token_of(uint c) { return min(gl_WorkGroupID.y * COLS + c, p.n_tokens - 1); }

// Adds elements k .. k + 7 to the sums.
void add_step(uint64_t row[ROWS], uint k, inout float sums[SUMS]) {
    vec4 norm[2] = vec4[2](load_norm(k / 4), load_norm(k / 4 + 1));
    vec4 s[COLS][2];
    float w[ROWS][8];
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        s[c][0] = load_s(token_of(c), k / 4);
        s[c][1] = load_s(token_of(c), k / 4 + 1);
    }
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        decode8(row[r], k, w[r]);
    }
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        [[unroll]] for (uint h = 0; h < 2; h++) {
            sums[ROWS * COLS + c] += dot(s[c][h], s[c][h]);
            vec4 y = s[c][h] * norm[h];
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                [[unroll]] for (uint i = 0; i < 4; i++) {
                    sums[r * COLS + c] += w[r][4 * h + i] * y[i];
                }
            }
        }
    }
}

float norm_scale(uint c) { return 1.0 / sqrt(whole(ROWS * COLS + c) / float(p.k) + p.eps); }

// The workgroup's share of s and normed: every n_groups-th pair of vectors. By its last threads: nothing waits
// for it.
void store_share() {
    uint n_pairs = p.k / 8;
    uint n_groups = gl_NumWorkGroups.x;
    uint share = (n_pairs + n_groups - 1) / n_groups * 2;
    for (uint i = gl_WorkGroupSize.x - 1 - gl_LocalInvocationID.x; i < share * COLS; i += gl_WorkGroupSize.x) {
        uint c = i / share;
        uint in_share = i - c * share;
        uint pair = in_share / 2 * n_groups + gl_WorkGroupID.x;
        uint token = gl_WorkGroupID.y * COLS + c;
        if (pair < n_pairs && token < p.n_tokens) {
            uint at = pair * 2 + in_share % 2;
            vec4 s = load_s(token, at);
            if (HAS_DELTA) {
                sum4[token * (p.k / 4) + at] = s;
            }
            normed4[token * (p.k / 4) + at] = s * norm_scale(c) * load_norm(at);
        }
    }
}

void main() {
    uint first_row = gl_WorkGroupID.x * ROWS;
    uint64_t row[ROWS];
    float sums[SUMS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        // Rows past the last repeat it.
        row[r] = p.matrix + uint64_t(min(first_row + r, p.n_expert - 1)) * row_bytes(p.k);
    }
    [[unroll]] for (uint i = 0; i < SUMS; i++) {
        sums[i] = 0.0;
    }
    for (uint k = gl_LocalInvocationID.x * 8; k < p.k; k += gl_WorkGroupSize.x * 8) {
        add_step(row, k, sums);
    }
    [[unroll]] for (uint i = 0; i < SUMS; i++) {
        float part = subgroupAdd(sums[i]);
        if (gl_SubgroupInvocationID == 0) {
            parts[i * gl_NumSubgroups + gl_SubgroupID] = part;
        }
    }
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < ROWS * COLS; i += gl_WorkGroupSize.x) {
        uint n = first_row + i / COLS;
        uint token = gl_WorkGroupID.y * COLS + i % COLS;
        if (n < p.n_expert && token < p.n_tokens) {
            logits[token * p.n_expert + n] = whole(i) * norm_scale(i % COLS);
        }
    }
    bool is_last = is_last_of(gl_NumWorkGroups.x, gl_WorkGroupID.y);
    store_share();
    if (is_last) {
        for (uint c = 0; c < COLS && gl_WorkGroupID.y * COLS + c < p.n_tokens; c++) {
            if (c > 0) {
                barrier();
            }
            choose(gl_WorkGroupID.y * COLS + c);
        }
    }
}

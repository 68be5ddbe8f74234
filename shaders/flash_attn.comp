#version 460
#include "common.glsl"
#include "kv.glsl"
#include "tanh.glsl"
// Causal attention with an online softmax over tiles of keys:
//   s = softcap(scale q.k), out = sum(exp(s - m) v) / (sum(exp(s - m)) [+ exp(sink - m)])
// One kernel for prompts (many rows) and for single tokens (few rows, the keys in splits).
//
// The heads that share a kv head share its loads: the rows of kv head h are r = token * G + g with
// G = n_head / n_kv_head, head = h * G + g. A token at position P sees cells 0..=P (with a window W, of
// these those above P - W). Positions ascend by one, so the cells in use are 0..=positions[n_tokens-1].
// A workgroup takes BR rows over BC keys at a time. A tile of keys is decoded into shared memory once for
// all rows, scored, and replaced by the tile of values.
//
// Bindings: 0 q [n_tokens][n_head][HEAD_K], 1 and 2 the caches of keys and values (see kv.glsl),
//   3 positions u32[n_tokens], 4 out [n_tokens][n_head][HEAD_V] (written when n_splits is 1), else
//   5 partial [n_splits][n_tokens][n_head][HEAD_V + 2]: sum(exp(s - m) v), m, sum(exp(s - m)).
// Spec constants: 1 HEAD_K, 2 HEAD_V (multiples of 8), 3 K_TYPE, 4 V_TYPE, 5 BR, 6 BC (powers of 2, BC at
// least 8), 7 HAS_SINKS. src/exec/attention.rs chooses them.
// Grid: x = blocks of BR of the n_tokens * G rows, y = kv head, z = split: an equal run of whole tiles.
layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;
layout(constant_id = 3) const uint K_TYPE = KV_F16;
layout(constant_id = 4) const uint V_TYPE = KV_F16;
layout(constant_id = 5) const uint BR = 8;
layout(constant_id = 6) const uint BC = 32;
layout(constant_id = 7) const bool HAS_SINKS = false;
layout(push_constant, scalar) uniform Push {
    uint64_t sinks; // f32[n_head]; 0 = none
    uint n_tokens;
    uint n_head;
    uint n_kv_head;
    uint n_splits;
    uint window; // 0 = none
    float scale;
    float softcap; // 0 = none
    uint _pad;
} p;
layout(binding = 0, std430) readonly buffer Q { vec4 q[]; };
layout(binding = 1, std430) readonly buffer KV4 { vec4 k_v4[]; };
layout(binding = 1, std430) readonly buffer KU4 { uvec4 k_u4[]; };
layout(binding = 1, scalar) readonly buffer KU16 { uint16_t k_u16[]; };
layout(binding = 2, std430) readonly buffer VV4 { vec4 v_v4[]; };
layout(binding = 2, std430) readonly buffer VU4 { uvec4 v_u4[]; };
layout(binding = 2, scalar) readonly buffer VU16 { uint16_t v_u16[]; };
layout(binding = 3, scalar) readonly buffer Positions { uint positions[]; };
layout(binding = 4, std430) writeonly buffer Out { vec4 result[]; };
layout(binding = 5, scalar) writeonly buffer Partial { float partial[]; };

KV_DECODER(k_decode, K_TYPE, k_v4, k_u4, k_u16)
KV_DECODER(v_decode, V_TYPE, v_v4, v_u4, v_u16)

// Lengths in vec4s. The odd strides keep the lanes of a score on different banks.
const uint THREADS = gl_WorkGroupSize.x;
const uint K4 = HEAD_K / 4;
const uint V4 = HEAD_V / 4;
const uint K_STRIDE = K4 + 1;
const uint S_STRIDE = BC / 4;

// Scores: a thread computes patches of SR rows by SC keys; with fewer scores than threads, S_LANES
// neighbours share a score's dimensions.
const uint PER_THREAD = BR * BC / THREADS;
const uint SC = PER_THREAD >= 16 ? 4 : (PER_THREAD >= 2 ? 2 : 1);
const uint SR_WANTED = PER_THREAD >= 16 ? 4 : (PER_THREAD >= 4 ? 2 : 1);
const uint SR = SR_WANTED < BR ? SR_WANTED : BR;
const uint KEY_COLUMNS = BC / SC;
const uint S_ITEMS = BR / SR * KEY_COLUMNS;
const uint S_LANES = THREADS >= 4 * S_ITEMS ? 4 : (THREADS >= 2 * S_ITEMS ? 2 : 1);

// Outputs: a patch is OR rows by one vec4 of dimensions; a thread has O_PATCHES of them. With fewer
// patches than threads, O_SLICES threads share a patch's keys.
const uint OR = BR < 4 ? BR : 4;
const uint O_ITEMS = BR / OR * V4;
const uint O_PATCHES = (O_ITEMS + THREADS - 1) / THREADS;
const uint O_SLICES_FIT = THREADS / O_ITEMS;
const uint O_SLICES = O_SLICES_FIT < 1 ? 1 : (O_SLICES_FIT < BC / 4 ? O_SLICES_FIT : BC / 4);

const uint K_TILE = BC * K_STRIDE;
const uint V_TILE = BC * V4;
const uint SLICE_SUMS = O_SLICES > 1 ? O_SLICES * O_ITEMS * OR : 1;
const uint KV_TILE = K_TILE > V_TILE ? K_TILE : V_TILE;
shared vec4 tile[KV_TILE > SLICE_SUMS ? KV_TILE : SLICE_SUMS]; // keys, then values
shared vec4 rows_q[BR * K_STRIDE];                             // scaled
shared vec4 scores[BR * S_STRIDE];                             // scores, then weights exp(s - m)
shared uint row_position[BR];
shared float row_max[BR];    // m
shared float row_sum[BR];    // sum(exp(s - m))
shared float row_shrink[BR]; // what the new m makes of earlier sums

const float MASKED = -3.0e38; // below every score; differences of it do not overflow

uint thread() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }

void load_rows(uint first_row, uint n_rows, uint group) {
    for (uint i = thread(); i < BR * K4; i += THREADS) {
        uint row = first_row + i / K4;
        uint token = row / group;
        uint head = gl_WorkGroupID.y * group + row % group;
        rows_q[i / K4 * K_STRIDE + i % K4] =
            row < n_rows ? p.scale * q[(token * p.n_head + head) * K4 + i % K4] : vec4(0.0);
    }
    for (uint r = thread(); r < BR; r += THREADS) {
        row_position[r] = positions[min(first_row + r, n_rows - 1) / group];
        row_max[r] = MASKED;
        row_sum[r] = 0.0;
    }
}

// Cells from `end` on hold nothing yet and count as zeros.
void load_keys(uint first, uint end) {
    for (uint i = thread(); i < BC * (HEAD_K / 8); i += THREADS) {
        uint key = i / (HEAD_K / 8);
        uint d8 = i % (HEAD_K / 8);
        vec4 lo = vec4(0.0);
        vec4 hi = vec4(0.0);
        if (first + key < end) {
            uint row = (first + key) * p.n_kv_head + gl_WorkGroupID.y;
            k_decode(row * kv_row_bytes(K_TYPE, HEAD_K), d8 * 8, lo, hi);
        }
        tile[key * K_STRIDE + d8 * 2] = lo;
        tile[key * K_STRIDE + d8 * 2 + 1] = hi;
    }
}

void load_values(uint first, uint end) {
    for (uint i = thread(); i < BC * (HEAD_V / 8); i += THREADS) {
        uint key = i / (HEAD_V / 8);
        uint d8 = i % (HEAD_V / 8);
        vec4 lo = vec4(0.0);
        vec4 hi = vec4(0.0);
        if (first + key < end) {
            uint row = (first + key) * p.n_kv_head + gl_WorkGroupID.y;
            v_decode(row * kv_row_bytes(V_TYPE, HEAD_V), d8 * 8, lo, hi);
        }
        tile[key * V4 + d8 * 2] = lo;
        tile[key * V4 + d8 * 2 + 1] = hi;
    }
}

void store_score(uint row, uint key, uint cell, float s) {
    uint position = row_position[row];
    bool seen = cell <= position && (p.window == 0 || cell + p.window > position);
    if (p.softcap != 0.0) {
        s = p.softcap * exact_tanh(s / p.softcap);
    }
    scores[row * S_STRIDE + key / 4][key % 4] = seen ? s : MASKED;
}

void score_patch(uint item, uint lane, uint first) {
    uint row = item / KEY_COLUMNS * SR;
    uint key = item % KEY_COLUMNS;
    float s[SR][SC];
    [[unroll]] for (uint i = 0; i < SR; ++i) {
        [[unroll]] for (uint j = 0; j < SC; ++j) {
            s[i][j] = 0.0;
        }
    }
    for (uint d = lane; d < K4; d += S_LANES) {
        vec4 k[SC];
        [[unroll]] for (uint j = 0; j < SC; ++j) {
            k[j] = tile[(key + j * KEY_COLUMNS) * K_STRIDE + d];
        }
        [[unroll]] for (uint i = 0; i < SR; ++i) {
            vec4 row_q = rows_q[(row + i) * K_STRIDE + d];
            [[unroll]] for (uint j = 0; j < SC; ++j) {
                s[i][j] += dot(row_q, k[j]);
            }
        }
    }
    [[unroll]] for (uint i = 0; i < SR; ++i) {
        [[unroll]] for (uint j = 0; j < SC; ++j) {
            if (S_LANES >= 2) {
                s[i][j] += subgroupShuffleXor(s[i][j], 1);
            }
            if (S_LANES == 4) {
                s[i][j] += subgroupShuffleXor(s[i][j], 2);
            }
            if (lane == 0) {
                store_score(row + i, key + j * KEY_COLUMNS, first + key + j * KEY_COLUMNS, s[i][j]);
            }
        }
    }
}

// A row is one subgroup's: scores become weights, and the row's m and sum move on.
void soften_rows() {
    for (uint r = gl_SubgroupID; r < BR; r += gl_NumSubgroups) {
        float most = MASKED;
        for (uint c = gl_SubgroupInvocationID; c < BC; c += gl_SubgroupSize) {
            most = max(most, scores[r * S_STRIDE + c / 4][c % 4]);
        }
        float before = row_max[r];
        float m = max(before, subgroupMax(most));
        float sum = 0.0;
        for (uint c = gl_SubgroupInvocationID; c < BC; c += gl_SubgroupSize) {
            float s = scores[r * S_STRIDE + c / 4][c % 4];
            float weight = s == MASKED ? 0.0 : exp(s - m);
            scores[r * S_STRIDE + c / 4][c % 4] = weight;
            sum += weight;
        }
        sum = subgroupAdd(sum);
        if (gl_SubgroupInvocationID == 0) {
            row_shrink[r] = exp(before - m);
            row_sum[r] = row_sum[r] * exp(before - m) + sum;
            row_max[r] = m;
        }
    }
}

void add_values(uint item, uint slice, inout vec4 o[OR]) {
    uint row = item / V4 * OR;
    uint d = item % V4;
    [[unroll]] for (uint i = 0; i < OR; ++i) {
        o[i] *= row_shrink[row + i];
    }
    for (uint c = slice; c < BC / 4; c += O_SLICES) {
        vec4 v0 = tile[(c * 4) * V4 + d];
        vec4 v1 = tile[(c * 4 + 1) * V4 + d];
        vec4 v2 = tile[(c * 4 + 2) * V4 + d];
        vec4 v3 = tile[(c * 4 + 3) * V4 + d];
        [[unroll]] for (uint i = 0; i < OR; ++i) {
            vec4 w = scores[(row + i) * S_STRIDE + c];
            o[i] += w.x * v0 + w.y * v1 + w.z * v2 + w.w * v3;
        }
    }
}

void store_row(uint r, uint row, uint group, uint d, vec4 o) {
    uint head = gl_WorkGroupID.y * group + row % group;
    uint at = row / group * p.n_head + head;
    float m = row_max[r];
    float sum = row_sum[r];
    if (p.n_splits == 1) {
        if (HAS_SINKS) {
            float sink = F32s(p.sinks).f[head];
            float top = max(m, sink);
            o *= exp(m - top);
            sum = sum * exp(m - top) + exp(sink - top);
        }
        result[at * V4 + d] = o / sum;
        return;
    }
    uint to = (gl_WorkGroupID.z * p.n_tokens * p.n_head + at) * (HEAD_V + 2);
    [[unroll]] for (uint j = 0; j < 4; ++j) {
        partial[to + d * 4 + j] = o[j];
    }
    if (d == 0) {
        partial[to + HEAD_V] = m;
        partial[to + HEAD_V + 1] = sum;
    }
}

// First cell that a token at a position sees.
uint window_start(uint position) {
    return p.window == 0 || position < p.window ? 0 : position + 1 - p.window;
}

void main() {
    uint group = p.n_head / p.n_kv_head;
    uint n_rows = p.n_tokens * group;
    uint first_row = gl_WorkGroupID.x * BR;
    load_rows(first_row, n_rows, group);

    // This split's run of tiles, cut down to what the rows of this block see.
    uint first_position = positions[first_row / group];
    uint last_position = positions[(min(first_row + BR, n_rows) - 1) / group];
    uint all_begin = window_start(positions[0]) / BC;
    uint all_end = positions[p.n_tokens - 1] / BC + 1;
    uint per_split = (all_end - all_begin + p.n_splits - 1) / p.n_splits;
    uint split_begin = all_begin + gl_WorkGroupID.z * per_split;
    uint begin = max(split_begin, window_start(first_position) / BC);
    uint end = min(split_begin + per_split, last_position / BC + 1);

    // Thread t has the patches t, t + THREADS, ...; or slice t / O_ITEMS of patch t % O_ITEMS.
    uint slice = O_SLICES > 1 ? thread() / O_ITEMS : 0;
    bool slices_fit = slice < O_SLICES;
    vec4 o[O_PATCHES][OR];
    [[unroll]] for (uint n = 0; n < O_PATCHES; ++n) {
        [[unroll]] for (uint i = 0; i < OR; ++i) {
            o[n][i] = vec4(0.0);
        }
    }
    for (uint t = begin; t < end; ++t) {
        load_keys(t * BC, last_position + 1);
        barrier();
        if (S_LANES == 1) {
            for (uint item = thread(); item < S_ITEMS; item += THREADS) {
                score_patch(item, 0, t * BC);
            }
        } else if (thread() / S_LANES < S_ITEMS) {
            score_patch(thread() / S_LANES, thread() % S_LANES, t * BC);
        }
        barrier();
        load_values(t * BC, last_position + 1);
        soften_rows();
        barrier();
        [[unroll]] for (uint n = 0; n < O_PATCHES; ++n) {
            uint item = O_SLICES > 1 ? thread() % O_ITEMS : thread() + n * THREADS;
            if (slices_fit && item < O_ITEMS) {
                add_values(item, slice, o[n]);
            }
        }
        barrier();
    }
    barrier(); // load_rows, when there was no tile
    if (O_SLICES > 1) { // one patch a thread; slice 0 adds the others up
        uint item = thread() % O_ITEMS;
        if (slices_fit) {
            [[unroll]] for (uint i = 0; i < OR; ++i) {
                tile[(slice * O_ITEMS + item) * OR + i] = o[0][i];
            }
        }
        barrier();
        for (uint s = 1; slice == 0 && s < O_SLICES; ++s) {
            [[unroll]] for (uint i = 0; i < OR; ++i) {
                o[0][i] += tile[(s * O_ITEMS + item) * OR + i];
            }
        }
    }
    [[unroll]] for (uint n = 0; n < O_PATCHES; ++n) {
        uint item = O_SLICES > 1 ? thread() % O_ITEMS : thread() + n * THREADS;
        uint row = item / V4 * OR;
        if (slice == 0 && item < O_ITEMS) {
            [[unroll]] for (uint i = 0; i < OR; ++i) {
                if (first_row + row + i < n_rows) {
                    store_row(row + i, first_row + row + i, group, item % V4, o[n][i]);
                }
            }
        }
    }
}

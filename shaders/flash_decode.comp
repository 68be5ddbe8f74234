#version 460
#include "common.glsl"
#include "kv.glsl"
#include "kv_encode.glsl"
#include "tanh.glsl"
#include "trig.glsl"
// Attention for few tokens, from the products with q, k and v on: norms of heads and rotation, new keys and
// values into the cache, and out = softmax(mask(scale * q k^T)) v, flash-style, over the cache and the new
// cells. Masks, window, soft cap and sinks are those of flash_attn.comp.
//
// The query heads that share a kv head, of all tokens, are the rows; a workgroup has ROWS of them and a
// split of the cells. It prepares its rows itself, and the new cells of its split, which are converted to the
// cache's type, stored, and kept in shared memory as what was stored: nothing waits for anything. A key is
// LANES lanes wide, each with 8 dimensions at a time, so that every load is 16 bytes of a whole row; each
// such group of lanes goes over cells of its own, KEYS at a time, with a softmax of its own. These are
// joined in the end; of the splits by the last workgroup that is done, in their order.
//
// Bindings: 0 q [n_tokens][n_head][HEAD_K], 1 k [n_tokens][n_kv_head][HEAD_K], 2 v likewise with HEAD_V,
//   3 and 4 the caches of keys and values (see kv.glsl), 5 positions u32[n_tokens], one after the other,
//   6 out [n_tokens][n_head][HEAD_V], 7 partial (unless n_splits is 1): [n_splits][n_tokens][n_head][HEAD_V]
//   sum(exp(s - m) v), then likewise [2] m, sum(exp(s - m)); 8 status, then counters.
// Spec constants: 1 HEAD_K, 2 HEAD_V (multiples of 8), 3 K_TYPE, 4 V_TYPE, 5 ROWS (at most 16), 6 LANES (a
// power of 2, at most the subgroup), 7 KEYS, 8 NEW: n_tokens, 9 SUBGROUPS of the workgroup, 10 JOIN_ROWS
// joined at a time, 11 HAS_SINKS, 12 Q_NORM, 13 K_NORM, 14 ROPE: 0 = none, 1 = pairs (2i, 2i+1), 2 = pairs
// (i, i + n_rot/2). src/exec/decode_attention.rs chooses them.
// Grid: x = blocks of ROWS of the n_tokens * G rows, y = kv head, z = split.
layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;
layout(constant_id = 3) const uint K_TYPE = KV_F16;
layout(constant_id = 4) const uint V_TYPE = KV_F16;
layout(constant_id = 5) const uint ROWS = 8;
layout(constant_id = 6) const uint LANES = 8;
layout(constant_id = 7) const uint KEYS = 2;
layout(constant_id = 8) const uint NEW = 1;
layout(constant_id = 9) const uint SUBGROUPS = 1;
layout(constant_id = 10) const uint JOIN_ROWS = 1;
layout(constant_id = 11) const bool HAS_SINKS = false;
layout(constant_id = 12) const bool Q_NORM = false;
layout(constant_id = 13) const bool K_NORM = false;
layout(constant_id = 14) const uint ROPE = 0;
layout(push_constant, scalar) uniform Push {
    uint64_t sinks; // f32[n_head]; 0 = none
    uint64_t q_norm; // f32[HEAD_K]; 0 = none
    uint64_t k_norm; // likewise
    uint64_t freqs; // f32[n_rot/2], radians per position
    uint n_tokens;
    uint n_head;
    uint n_kv_head;
    uint n_splits; // <= MAX_SPLITS
    uint window; // 0 = none
    float scale;
    float softcap; // 0 = none
    float eps;
    uint n_rot;
    uint rot_offset;
    float mscale;
    uint _pad;
} p;
layout(binding = 0, scalar) readonly buffer Q { float q[]; };
layout(binding = 1, scalar) readonly buffer K { float k[]; };
layout(binding = 2, scalar) readonly buffer V { float v[]; };
layout(binding = 3, std430) readonly buffer KV4 { vec4 k_v4[]; };
layout(binding = 3, std430) readonly buffer KU4 { uvec4 k_u4[]; };
layout(binding = 3, scalar) buffer KU16 { uint16_t k_u16[]; };
layout(binding = 3, scalar) writeonly buffer KF32 { float k_f32[]; };
layout(binding = 4, std430) readonly buffer VV4 { vec4 v_v4[]; };
layout(binding = 4, std430) readonly buffer VU4 { uvec4 v_u4[]; };
layout(binding = 4, scalar) buffer VU16 { uint16_t v_u16[]; };
layout(binding = 4, scalar) writeonly buffer VF32 { float v_f32[]; };
layout(binding = 5, scalar) readonly buffer Positions { uint positions[]; };
layout(binding = 6, std430) writeonly buffer Out { vec4 result[]; };
layout(binding = 7, std430) coherent buffer Partial4 { vec4 partial4[]; };
layout(binding = 7, scalar) coherent buffer Partial { float partial[]; };
layout(binding = 8, scalar) coherent buffer Status { uint status[]; };
#include "last_group.glsl"

KV_DECODER(k_decode, K_TYPE, k_v4, k_u4, k_u16)
KV_DECODER(v_decode, V_TYPE, v_v4, v_u4, v_u16)

const uint MAX_SPLITS = 64;
const uint JOINED_AT_ONCE = 8; // splits whose results are on their way
const float MASKED = -3.0e38; // below every score; differences of it do not overflow

// Lengths in vec4s, and runs of 8 dimensions that a lane has.
const uint K4 = HEAD_K / 4;
const uint V4 = HEAD_V / 4;
const uint K_RUNS = (HEAD_K / 8 + LANES - 1) / LANES;
const uint V_RUNS = (HEAD_V / 8 + LANES - 1) / LANES;

// Sums over a key's lanes end where they are needed: lane i of them has those of rows i / OWN_STEP * OWN and
// the OWN - 1 after it.
const uint ROWS_PADDED = ROWS > 8 ? 16 : (ROWS > 4 ? 8 : (ROWS > 2 ? 4 : ROWS));
const uint OWN = ROWS_PADDED > LANES ? ROWS_PADDED / LANES : 1;
const uint OWN_STEP = LANES / (ROWS_PADDED / OWN);

// First prepared rows and new cells, at last what subgroups found.
const uint NEW_K_AT = ROWS * K4;
const uint NEW_V_AT = NEW_K_AT + NEW * K4;
const uint PREPARED = NEW_V_AT + NEW * V4;
const uint JOINED = SUBGROUPS * JOIN_ROWS * V4;
shared vec4 pool[PREPARED > JOINED ? PREPARED : JOINED];
shared float row_m[SUBGROUPS * ROWS];
shared float row_l[SUBGROUPS * ROWS];
shared float split_share[ROWS * MAX_SPLITS];

// What this workgroup works on.
uint n_rows;
uint first_row;
uint head_group; // query heads of a kv head
uint begin;      // its cells
uint end;
uint new_begin; // those of them that are new

uint n_new() { return end - new_begin; }
uint token_of(uint row) { return min(first_row + row, n_rows - 1) / head_group; }
// Of a row: token * n_head + head.
uint out_row(uint row) {
    return token_of(row) * p.n_head + gl_WorkGroupID.y * head_group + (first_row + row) % head_group;
}

// First cell that a token at a position sees.
uint window_start(uint position) {
    return p.window == 0 || position < p.window ? 0 : position + 1 - p.window;
}

void find_cells() {
    uint first = window_start(positions[0]);
    uint last = positions[p.n_tokens - 1] + 1;
    // Whole rounds of the workgroup's first subgroup, so that vectors of cells start alike.
    uint round = KEYS * (gl_SubgroupSize / LANES);
    uint size = ((last - first + p.n_splits - 1) / p.n_splits + round - 1) / round * round;
    begin = min(first + gl_WorkGroupID.z * size, last);
    end = min(begin + size, last);
    new_begin = clamp(positions[0], begin, end);
}

float raw_head(bool is_q, uint at) { return is_q ? q[at] : k[at]; }
void put(uint at, uint i, float value) { pool[at + i / 4][i % 4] = value; }

// A head of q or k, by one subgroup: its norm, rotation and a factor, into the pool from vec4 `at` on.
void prepare_head(bool is_q, uint src, uint position, uint at, float factor) {
    float squares = 0.0;
    for (uint i = gl_SubgroupInvocationID; i < HEAD_K; i += gl_SubgroupSize) {
        float value = raw_head(is_q, src + i);
        squares += value * value;
    }
    bool has_norm = is_q ? Q_NORM : K_NORM;
    F32s norm = F32s(is_q ? p.q_norm : p.k_norm);
    float scale = has_norm ? 1.0 / sqrt(subgroupAdd(squares) / float(HEAD_K) + p.eps) : 1.0;
    uint n_rot = ROPE == 0 ? 0 : p.n_rot;
    for (uint i = gl_SubgroupInvocationID; i < HEAD_K - n_rot; i += gl_SubgroupSize) {
        uint d = i < p.rot_offset ? i : i + n_rot;
        float value = raw_head(is_q, src + d) * scale;
        if (has_norm) {
            value *= norm.f[d];
        }
        put(at, d, value * factor);
    }
    for (uint pair = gl_SubgroupInvocationID; pair < n_rot / 2; pair += gl_SubgroupSize) {
        precise float theta = float(position) * F32s(p.freqs).f[pair];
        vec2 cs = cos_sin(theta) * p.mscale * factor;
        uint a = p.rot_offset + (ROPE == 1 ? 2 * pair : pair);
        uint b = a + (ROPE == 1 ? 1 : n_rot / 2);
        vec2 value = vec2(raw_head(is_q, src + a), raw_head(is_q, src + b)) * scale;
        if (has_norm) {
            value *= vec2(norm.f[a], norm.f[b]);
        }
        put(at, a, value.x * cs.x - value.y * cs.y);
        put(at, b, value.x * cs.y + value.y * cs.x);
    }
}

// The rows, then the new keys, then the new values; one each subgroup at a time.
void prepare() {
    uint n = ROWS + 2 * n_new();
    for (uint i = gl_SubgroupID; i < n; i += gl_NumSubgroups) {
        if (i < ROWS) {
            prepare_head(true, out_row(i) * HEAD_K, positions[token_of(i)], i * K4, p.scale);
            continue;
        }
        uint cell = (i - ROWS) % n_new();
        uint token = new_begin + cell - positions[0];
        uint head = token * p.n_kv_head + gl_WorkGroupID.y;
        if (i < ROWS + n_new()) {
            prepare_head(false, head * HEAD_K, positions[token], NEW_K_AT + cell * K4, 1.0);
        } else {
            for (uint d = gl_SubgroupInvocationID; d < HEAD_V; d += gl_SubgroupSize) {
                put(NEW_V_AT + cell * V4, d, v[head * HEAD_V + d]);
            }
        }
    }
}

// New cells become what the cache has of them; of the workgroups with the same cells the first stores them.
bool encodes_v;
uint pool_at(uint row, uint i) {
    return (encodes_v ? NEW_V_AT + row * V4 : NEW_K_AT + row * K4) + i / 4;
}
uint encoded_length() { return encodes_v ? HEAD_V : HEAD_K; }
float kv_value(uint row, uint i) { return i < encoded_length() ? pool[pool_at(row, i)][i % 4] : 0.0; }
void kv_keep(uint row, uint i, float value) {
    if (i < encoded_length()) {
        pool[pool_at(row, i)][i % 4] = value;
    }
}
void kv_put(uint at, uint half_word) {
    if (gl_WorkGroupID.x != 0) {
        return;
    }
    if (encodes_v) {
        v_u16[at] = uint16_t(half_word);
    } else {
        k_u16[at] = uint16_t(half_word);
    }
}
void kv_put_f32(uint at, float value) {
    if (gl_WorkGroupID.x != 0) {
        return;
    }
    if (encodes_v) {
        v_f32[at] = value;
    } else {
        k_f32[at] = value;
    }
}

void encode(bool is_v) {
    encodes_v = is_v;
    uint type = is_v ? V_TYPE : K_TYPE;
    uint head = is_v ? HEAD_V : HEAD_K;
    uint units = kv_row_units(type, head);
    for (uint i = gl_LocalInvocationID.x; i < n_new() * units; i += gl_WorkGroupSize.x) {
        uint cell_row = (new_begin + i / units) * p.n_kv_head + gl_WorkGroupID.y;
        kv_encode(type, head, i / units, i % units, cell_row);
    }
}

// Which lanes of which key of a round this one is among.
uint key_lane() { return gl_SubgroupInvocationID % LANES; }
uint key_group() { return gl_SubgroupInvocationID / LANES; }
// Run r of the lane's, as an index of 8 dimensions of a head with n of them; past the end the last one.
uint run_of(uint r, uint n) { return min(key_lane() + r * LANES, n - 1); }
bool has_run(uint r, uint n) { return key_lane() + r * LANES < n; }
// The lane that has the sums of a row for this one's key.
uint owner(uint row) { return key_group() * LANES + row / OWN * OWN_STEP; }

vec4 rows_q[ROWS][K_RUNS][2];
vec4 o[ROWS][V_RUNS][2]; // of the lane's keys: sum(exp(s - m) v)
float m[OWN];            // their largest score
float l[OWN];            // sum(exp(s - m))
uint own_position[OWN];

void clear() {
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < K_RUNS; c++) {
            uint at = r * K4 + run_of(c, HEAD_K / 8) * 2;
            rows_q[r][c][0] = has_run(c, HEAD_K / 8) ? pool[at] : vec4(0.0);
            rows_q[r][c][1] = has_run(c, HEAD_K / 8) ? pool[at + 1] : vec4(0.0);
        }
        [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
            o[r][c][0] = vec4(0.0);
            o[r][c][1] = vec4(0.0);
        }
    }
    [[unroll]] for (uint i = 0; i < OWN; i++) {
        m[i] = MASKED;
        l[i] = 0.0;
        own_position[i] = positions[token_of(key_lane() / OWN_STEP * OWN + i)];
    }
}

// The lane's runs of one cell; `is_new`: out of the pool.
void load_key(uint cell, bool is_new, out vec4 key[K_RUNS][2]) {
    [[unroll]] for (uint c = 0; c < K_RUNS; c++) {
        uint run = run_of(c, HEAD_K / 8);
        if (is_new) {
            uint at = NEW_K_AT + (cell - new_begin) * K4 + run * 2;
            key[c][0] = pool[at];
            key[c][1] = pool[at + 1];
        } else {
            uint row = cell * p.n_kv_head + gl_WorkGroupID.y;
            k_decode(row * kv_row_bytes(K_TYPE, HEAD_K), run * 8, key[c][0], key[c][1]);
        }
        // Where q is 0, too: 0 times infinity is none.
        key[c][0] = has_run(c, HEAD_K / 8) ? key[c][0] : vec4(0.0);
        key[c][1] = has_run(c, HEAD_K / 8) ? key[c][1] : vec4(0.0);
    }
}

void load_value(uint cell, bool is_new, out vec4 value[V_RUNS][2]) {
    [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
        uint run = run_of(c, HEAD_V / 8);
        if (is_new) {
            uint at = NEW_V_AT + (cell - new_begin) * V4 + run * 2;
            value[c][0] = pool[at];
            value[c][1] = pool[at + 1];
        } else {
            uint row = cell * p.n_kv_head + gl_WorkGroupID.y;
            v_decode(row * kv_row_bytes(V_TYPE, HEAD_V), run * 8, value[c][0], value[c][1]);
        }
    }
}

// The scores of a key: for the lane's own rows, in s[0 .. OWN].
void score(vec4 key[K_RUNS][2], out float s[ROWS_PADDED]) {
    [[unroll]] for (uint r = 0; r < ROWS_PADDED; r++) {
        s[r] = 0.0;
        if (r < ROWS) {
            [[unroll]] for (uint c = 0; c < K_RUNS; c++) {
                s[r] += dot(rows_q[r][c][0], key[c][0]) + dot(rows_q[r][c][1], key[c][1]);
            }
        }
    }
    // Halves of the lanes exchange halves of the rows, as long as there are several.
    uint n = ROWS_PADDED;
    [[unroll]] for (uint offset = LANES / 2; offset > 0; offset /= 2) {
        bool upper = (gl_SubgroupInvocationID & offset) != 0;
        if (n > 1) {
            n /= 2;
            [[unroll]] for (uint i = 0; i < n; i++) {
                float sent = upper ? s[i] : s[i + n];
                s[i] = (upper ? s[i + n] : s[i]) + subgroupShuffleXor(sent, offset);
            }
        } else {
            s[0] += subgroupShuffleXor(s[0], offset);
        }
    }
}

float masked(float s, uint cell, uint stop, uint own) {
    uint position = own_position[own];
    bool seen = cell < stop && cell <= position && (p.window == 0 || cell + p.window > position);
    if (p.softcap != 0.0) {
        s = p.softcap * exact_tanh(s / p.softcap);
    }
    return seen ? s : MASKED;
}

// KEYS cells for each group of lanes, from `start` on, none from `stop` on.
void add_cells(uint start, uint stop, bool is_new) {
    vec4 key[KEYS][K_RUNS][2];
    vec4 value[KEYS][V_RUNS][2];
    uint key_groups = gl_SubgroupSize / LANES;
    [[unroll]] for (uint j = 0; j < KEYS; j++) {
        load_key(min(start + j * key_groups + key_group(), stop - 1), is_new, key[j]);
    }
    [[unroll]] for (uint j = 0; j < KEYS; j++) {
        load_value(min(start + j * key_groups + key_group(), stop - 1), is_new, value[j]);
    }
    float weight[KEYS][OWN];
    float m_new[OWN];
    [[unroll]] for (uint i = 0; i < OWN; i++) {
        m_new[i] = m[i];
    }
    [[unroll]] for (uint j = 0; j < KEYS; j++) {
        float s[ROWS_PADDED];
        score(key[j], s);
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            weight[j][i] = masked(s[i], start + j * key_groups + key_group(), stop, i);
            m_new[i] = max(m_new[i], weight[j][i]);
        }
    }
    float shrink[OWN];
    [[unroll]] for (uint i = 0; i < OWN; i++) {
        shrink[i] = exp(m[i] - m_new[i]);
        l[i] *= shrink[i];
        m[i] = m_new[i];
        [[unroll]] for (uint j = 0; j < KEYS; j++) {
            weight[j][i] = weight[j][i] == MASKED ? 0.0 : exp(weight[j][i] - m[i]);
            l[i] += weight[j][i];
        }
    }
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        float f = subgroupShuffle(shrink[r % OWN], owner(r));
        float w[KEYS];
        [[unroll]] for (uint j = 0; j < KEYS; j++) {
            w[j] = subgroupShuffle(weight[j][r % OWN], owner(r));
        }
        [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
            [[unroll]] for (uint h = 0; h < 2; h++) {
                o[r][c][h] *= f;
                [[unroll]] for (uint j = 0; j < KEYS; j++) {
                    o[r][c][h] += w[j] * value[j][c][h];
                }
            }
        }
    }
}

// This subgroup's rounds of the workgroup's cells: those of the cache, then the new ones.
void add_all_cells() {
    uint round = KEYS * (gl_SubgroupSize / LANES);
    uint n_old = (new_begin - begin + round - 1) / round;
    uint n = n_old + (n_new() + round - 1) / round;
    for (uint i = gl_SubgroupID; i < n; i += gl_NumSubgroups) {
        bool is_new = i >= n_old;
        add_cells(is_new ? new_begin + (i - n_old) * round : begin + i * round, is_new ? end : new_begin, is_new);
    }
}

// Joins the subgroup's groups of lanes; all of them have the result.
void join_groups() {
    for (uint offset = LANES; offset < gl_SubgroupSize; offset *= 2) {
        float shrink[OWN];
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            float top = max(m[i], subgroupShuffleXor(m[i], offset));
            shrink[i] = exp(m[i] - top);
            l[i] *= shrink[i];
            l[i] += subgroupShuffleXor(l[i], offset);
            m[i] = top;
        }
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            float f = subgroupShuffle(shrink[r % OWN], owner(r));
            [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
                [[unroll]] for (uint h = 0; h < 2; h++) {
                    o[r][c][h] *= f;
                    o[r][c][h] += subgroupShuffleXor(o[r][c][h], offset);
                }
            }
        }
    }
    if (key_group() == 0 && key_lane() % OWN_STEP == 0) {
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            uint row = key_lane() / OWN_STEP * OWN + i;
            if (row < ROWS) {
                row_m[gl_SubgroupID * ROWS + row] = m[i];
                row_l[gl_SubgroupID * ROWS + row] = l[i];
            }
        }
    }
}

uint n_out_rows() { return p.n_tokens * p.n_head; }
uint head_of(uint row) { return out_row(row) % p.n_head; }

// Vector d of a row of the workgroup, as the split's result or the result itself.
void store(uint row, uint d, vec4 sum, float top, float weights) {
    if (p.n_splits == 1) {
        if (HAS_SINKS) {
            float sink = F32s(p.sinks).f[head_of(row)];
            float most = max(top, sink);
            sum *= exp(top - most);
            weights = weights * exp(top - most) + exp(sink - most);
        }
        result[out_row(row) * V4 + d] = sum / weights;
        return;
    }
    uint at = gl_WorkGroupID.z * n_out_rows() + out_row(row);
    partial4[at * V4 + d] = sum;
    if (d == 0) {
        uint to = p.n_splits * n_out_rows() * HEAD_V + at * 2;
        partial[to] = top;
        partial[to + 1] = weights;
    }
}

// Joins the subgroups, JOIN_ROWS rows at a time.
void join_subgroups() {
    [[unroll]] for (uint first = 0; first < ROWS; first += JOIN_ROWS) {
        barrier(); // earlier readers of the pool
        if (key_group() == 0) {
            [[unroll]] for (uint r = first; r < min(first + JOIN_ROWS, ROWS); r++) {
                [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
                    if (has_run(c, HEAD_V / 8)) {
                        uint at = (gl_SubgroupID * JOIN_ROWS + r - first) * V4 + run_of(c, HEAD_V / 8) * 2;
                        pool[at] = o[r][c][0];
                        pool[at + 1] = o[r][c][1];
                    }
                }
            }
        }
        barrier();
        for (uint i = gl_LocalInvocationID.x; i < JOIN_ROWS * V4; i += gl_WorkGroupSize.x) {
            uint row = first + i / V4;
            if (row >= ROWS || first_row + row >= n_rows) {
                continue;
            }
            float top = MASKED;
            for (uint s = 0; s < gl_NumSubgroups; s++) {
                top = max(top, row_m[s * ROWS + row]);
            }
            vec4 sum = vec4(0.0);
            float weights = 0.0;
            for (uint s = 0; s < gl_NumSubgroups; s++) {
                float share = exp(row_m[s * ROWS + row] - top);
                sum += share * pool[s * JOIN_ROWS * V4 + i];
                weights += share * row_l[s * ROWS + row];
            }
            store(row, i % V4, sum, top, weights);
        }
    }
}

// A row's share of each split: exp(m - M) / (sum(exp(m - M) l) [+ exp(sink - M)]). By one subgroup.
void find_shares(uint row) {
    uint at = p.n_splits * n_out_rows() * HEAD_V + out_row(row) * 2;
    uint step = n_out_rows() * 2;
    float top = MASKED;
    for (uint s = gl_SubgroupInvocationID; s < p.n_splits; s += gl_SubgroupSize) {
        top = max(top, partial[at + s * step]);
    }
    top = subgroupMax(top);
    float weights = 0.0;
    float sink = HAS_SINKS ? F32s(p.sinks).f[head_of(row)] : 0.0;
    top = HAS_SINKS ? max(top, sink) : top;
    for (uint s = gl_SubgroupInvocationID; s < p.n_splits; s += gl_SubgroupSize) {
        weights += partial[at + s * step + 1] * exp(partial[at + s * step] - top);
    }
    weights = subgroupAdd(weights) + (HAS_SINKS ? exp(sink - top) : 0.0);
    for (uint s = gl_SubgroupInvocationID; s < p.n_splits; s += gl_SubgroupSize) {
        split_share[row * MAX_SPLITS + s] = exp(partial[at + s * step] - top) / weights;
    }
}

void join_splits() {
    for (uint r = gl_SubgroupID; r < ROWS; r += gl_NumSubgroups) {
        find_shares(r);
    }
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < ROWS * V4; i += gl_WorkGroupSize.x) {
        uint row = i / V4;
        if (first_row + row >= n_rows) {
            continue;
        }
        uint at = out_row(row) * V4 + i % V4;
        vec4 sum = vec4(0.0);
        for (uint first = 0; first < p.n_splits; first += JOINED_AT_ONCE) {
            vec4 part[JOINED_AT_ONCE];
            [[unroll]] for (uint j = 0; j < JOINED_AT_ONCE; j++) {
                part[j] = partial4[min(first + j, p.n_splits - 1) * n_out_rows() * V4 + at];
            }
            [[unroll]] for (uint j = 0; j < JOINED_AT_ONCE; j++) {
                float share = split_share[row * MAX_SPLITS + min(first + j, p.n_splits - 1)];
                sum += first + j < p.n_splits ? share * part[j] : vec4(0.0);
            }
        }
        result[at] = sum;
    }
}

void main() {
    head_group = p.n_head / p.n_kv_head;
    n_rows = p.n_tokens * head_group;
    first_row = gl_WorkGroupID.x * ROWS;
    find_cells();
    prepare();
    barrier();
    encode(false);
    encode(true);
    barrier();
    clear();
    add_all_cells();
    join_groups();
    join_subgroups();
    uint n_blocks = (n_rows + ROWS - 1) / ROWS;
    if (p.n_splits > 1 && is_last_of(p.n_splits, gl_WorkGroupID.y * n_blocks + gl_WorkGroupID.x)) {
        join_splits();
    }
}

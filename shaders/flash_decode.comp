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
// The query heads that share a kv head, of all tokens, are the rows; a workgroup has ROWS of them, one each
// subgroup, and a split of the cells. All subgroups go over the same cells, so that what one has read is in the
// cache of all. The workgroup prepares its rows itself, and the new cells of its split, which are converted to
// the cache's type, stored, and kept in shared memory as what was stored: nothing waits for anything. A cell is
// LANES lanes wide, each with 8 dimensions at a time, so that every load is 16 bytes of a whole row; each such
// group of lanes has a maximum and sums of its own, and KEYS cells on their way, a subgroup a round of them: while
// a round is added, the next one comes. Splits are joined by the last workgroup that is done, in their order.
//
// With few tokens this is code that runs once, in few workgroups: what it takes is how long it is. So subgroups
// have one row each, although several would need fewer loads and conversions.
//
// Bindings: 0 q [n_tokens][n_head][HEAD_K], 1 k [n_tokens][n_kv_head][HEAD_K], 2 v likewise with HEAD_V,
//   3 and 4 the caches of keys and values (see kv.glsl), 5 positions u32[n_tokens], one after the other,
//   6 out [n_tokens][n_head][HEAD_V], 7 partial (unless n_splits is 1): [n_splits][n_tokens][n_head][HEAD_V]
//   sum(exp(s - m) v), then likewise [2] m, sum(exp(s - m)); 8 status, then counters.
// Spec constants: 1 HEAD_K, 2 HEAD_V (multiples of 8), 3 K_TYPE, 4 V_TYPE, 5 ROWS: subgroups, 6 LANES (a
// power of 2, at most the subgroup), 7 KEYS, 8 NEW: n_tokens, 9 HAS_SINKS, 10 Q_NORM, 11 K_NORM, 12 ROPE: 0 =
// none, 1 = pairs (2i, 2i+1), 2 = pairs (i, i + n_rot/2). src/exec/decode_attention.rs chooses them.
// Grid: x = blocks of ROWS of the n_tokens * G rows, y = kv head, z = split.
layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;
layout(constant_id = 3) const uint K_TYPE = KV_F16;
layout(constant_id = 4) const uint V_TYPE = KV_F16;
layout(constant_id = 5) const uint ROWS = 8;
layout(constant_id = 6) const uint LANES = 8;
layout(constant_id = 7) const uint KEYS = 2;
layout(constant_id = 8) const uint NEW = 1;
layout(constant_id = 9) const bool HAS_SINKS = false;
layout(constant_id = 10) const bool Q_NORM = false;
layout(constant_id = 11) const bool K_NORM = false;
layout(constant_id = 12) const uint ROPE = 0;
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
layout(binding = 0, std430) readonly buffer Q { vec4 q[]; };
layout(binding = 1, std430) readonly buffer K { vec4 k[]; };
layout(binding = 2, std430) readonly buffer V { vec4 v[]; };
layout(binding = 3, std430) readonly buffer KU4 { uvec4 k_u4[]; };
layout(binding = 3, scalar) buffer KU16 { uint16_t k_u16[]; };
layout(binding = 3, scalar) writeonly buffer KF32 { float k_f32[]; };
layout(binding = 4, std430) readonly buffer VU4 { uvec4 v_u4[]; };
layout(binding = 4, scalar) buffer VU16 { uint16_t v_u16[]; };
layout(binding = 4, scalar) writeonly buffer VF32 { float v_f32[]; };
layout(binding = 5, scalar) readonly buffer Positions { uint positions[]; };
layout(binding = 6, std430) writeonly buffer Out { vec4 result[]; };
layout(binding = 7, std430) coherent buffer Partial4 { vec4 partial4[]; };
layout(binding = 7, scalar) coherent buffer Partial { float partial[]; };
layout(binding = 8, scalar) coherent buffer Status { uint status[]; };
#include "last_group.glsl"

KV_LOADER(k_load, K_TYPE, k_u4, k_u16)
KV_LOADER(v_load, V_TYPE, v_u4, v_u16)

const uint MAX_SPLITS = 64;
const uint JOINED_AT_ONCE = 16; // splits whose results are on their way
const float MASKED = -3.0e38; // below every score; differences of it do not overflow

// Lengths in vec4s, and the vec4s and runs of 8 dimensions that a lane has.
const uint K4 = HEAD_K / 4;
const uint V4 = HEAD_V / 4;
const uint K_VECS = (K4 + LANES - 1) / LANES;
const uint K_RUNS = (HEAD_K / 8 + LANES - 1) / LANES;
const uint V_RUNS = (HEAD_V / 8 + LANES - 1) / LANES;

const uint LOCAL = gl_WorkGroupSize.x;
const uint SUBGROUP = LOCAL / ROWS;
const uint K_RAW = kv_raw_vecs(K_TYPE);
const uint V_RAW = kv_raw_vecs(V_TYPE);
const uint GROUPS = SUBGROUP / LANES; // groups of lanes of a subgroup
const uint ROUND = KEYS * GROUPS;     // cells of a subgroup at a time

// Prepared rows and new cells.
const uint NEW_K_AT = ROWS * K4;
const uint NEW_V_AT = NEW_K_AT + NEW * K4;
shared vec4 pool[NEW_V_AT + NEW * V4];
shared float split_share[ROWS * MAX_SPLITS];

// What this workgroup works on. Cells are counted from its first.
uint n_rows;
uint first_row;
uint head_group; // query heads of a kv head
uint begin;      // its first cell
int n_cells;
int n_old;       // those before the new ones
uint new_token;  // token of the first new one

uint n_new() { return uint(n_cells - n_old); }
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
    // Whole rounds, so that all splits but the last have their lanes full.
    uint size = ((last - first + p.n_splits - 1) / p.n_splits + ROUND - 1) / ROUND * ROUND;
    begin = min(first + gl_WorkGroupID.z * size, last);
    uint end = min(begin + size, last);
    uint new_begin = clamp(positions[0], begin, end);
    n_cells = int(end - begin);
    n_old = int(new_begin - begin);
    new_token = new_begin - positions[0];
}

// Which invocation of the workgroup this is, which lane of a key, and of which of a subgroup's keys.
uint invocation() { return gl_SubgroupID * SUBGROUP + gl_SubgroupInvocationID; }
uint key_lane() { return gl_SubgroupInvocationID % LANES; }
uint key_group() { return gl_SubgroupInvocationID / LANES; }
// Part r of the lane's, of n that a head has; past the end the last one, with the same results as its owner.
bool has_run(uint r, uint n) { return n % LANES == 0 || key_lane() + r * LANES < n; }
uint run_of(uint r, uint n) { return has_run(r, n) ? key_lane() + r * LANES : n - 1; }

// A head of q or k, by a group of lanes: its norm and a factor, into the pool from vec4 `at` on.
void prepare_head(bool is_q, uint head, uint at, float factor) {
    vec4 x[K_VECS];
    [[unroll]] for (uint c = 0; c < K_VECS; c++) {
        x[c] = is_q ? q[head * K4 + run_of(c, K4)] : k[head * K4 + run_of(c, K4)];
    }
    if (is_q ? Q_NORM : K_NORM) {
        F32s norm = F32s(is_q ? p.q_norm : p.k_norm);
        float squares = 0.0;
        [[unroll]] for (uint c = 0; c < K_VECS; c++) {
            squares += has_run(c, K4) ? dot(x[c], x[c]) : 0.0;
            uint d = run_of(c, K4) * 4;
            x[c] *= vec4(norm.f[d], norm.f[d + 1], norm.f[d + 2], norm.f[d + 3]);
        }
        [[unroll]] for (uint offset = LANES / 2; offset > 0; offset /= 2) {
            squares += subgroupShuffleXor(squares, offset);
        }
        factor /= sqrt(squares / float(HEAD_K) + p.eps);
    }
    [[unroll]] for (uint c = 0; c < K_VECS; c++) {
        pool[at + run_of(c, K4)] = x[c] * factor;
    }
}

// A pair of dimensions of a prepared head.
void turn(uint at, uint pair, uint position) {
    precise float theta = float(position) * F32s(p.freqs).f[pair];
    vec2 cs = cos_sin(theta) * p.mscale;
    uint a = p.rot_offset + (ROPE == 1 ? 2 * pair : pair);
    uint b = a + (ROPE == 1 ? 1 : p.n_rot / 2);
    vec2 x = vec2(pool[at + a / 4][a % 4], pool[at + b / 4][b % 4]);
    pool[at + a / 4][a % 4] = x.x * cs.x - x.y * cs.y;
    pool[at + b / 4][b % 4] = x.x * cs.y + x.y * cs.x;
}

// The rows, the new keys, which follow them in the pool, and, from the last invocation on, the new values.
void prepare() {
    for (uint i = LOCAL - 1 - invocation(); i < n_new() * V4; i += LOCAL) {
        pool[NEW_V_AT + i] = v[((new_token + i / V4) * p.n_kv_head + gl_WorkGroupID.y) * V4 + i % V4];
    }
    uint n_heads = ROWS + n_new();
    for (uint i = gl_SubgroupID * GROUPS + key_group(); i < n_heads; i += ROWS * GROUPS) {
        bool is_q = i < ROWS;
        uint head = is_q ? out_row(i) : (new_token + i - ROWS) * p.n_kv_head + gl_WorkGroupID.y;
        prepare_head(is_q, head, i * K4, is_q ? p.scale : 1.0);
    }
    barrier();
    uint n_pairs = ROPE == 0 ? 0 : p.n_rot / 2;
    for (uint i = invocation(); i < n_heads * n_pairs; i += LOCAL) {
        uint head = i / n_pairs;
        turn(head * K4, i % n_pairs, positions[head < ROWS ? token_of(head) : new_token + head - ROWS]);
    }
    barrier();
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
bool stores() { return gl_WorkGroupID.x == 0; }
void kv_put(uint at, uint half_word) {
    if (stores() && encodes_v) {
        v_u16[at] = uint16_t(half_word);
    } else if (stores()) {
        k_u16[at] = uint16_t(half_word);
    }
}
void kv_put_f32(uint at, float value) {
    if (stores() && encodes_v) {
        v_f32[at] = value;
    } else if (stores()) {
        k_f32[at] = value;
    }
}

void encode(bool is_v) {
    encodes_v = is_v;
    uint type = is_v ? V_TYPE : K_TYPE;
    uint head = is_v ? HEAD_V : HEAD_K;
    uint units = kv_row_units(type, head);
    for (uint i = is_v ? LOCAL - 1 - invocation() : invocation(); i < n_new() * units; i += LOCAL) {
        uint cell_row = (begin + uint(n_old) + i / units) * p.n_kv_head + gl_WorkGroupID.y;
        kv_encode(type, head, i / units, i % units, cell_row);
    }
}

vec4 row_q[K_RUNS][2];
vec4 o[V_RUNS][2]; // of the lane's cells: sum(exp(s - m) v)
float m;           // their largest score
float l;           // sum(exp(s - m))

// What a round has of the cache, as it is there.
uvec4 raw_keys[KEYS][K_RUNS][K_RAW];
uvec4 raw_values[KEYS][V_RUNS][V_RAW];

// The cell of key j for this group of lanes in the round from cell `first` on.
uint cell_of(uint first, uint j) { return first + j * GROUPS + key_group(); }

// Defines NAME(first): the lane's runs of the keys or values of the round of old cells from `first` on, past the
// end the last cell again.
#define ROUND_LOADER(NAME, TO, LOAD, TYPE, HEAD, RUNS, RAW)                                                \
    void NAME(uint first) {                                                                                \
        [[unroll]] for (uint j = 0; j < KEYS; j++) {                                                       \
            uint cell = min(cell_of(first, j), uint(n_old) - 1);                                           \
            uint row = ((begin + cell) * p.n_kv_head + gl_WorkGroupID.y) * kv_row_bytes(TYPE, HEAD);       \
            [[unroll]] for (uint c = 0; c < RUNS; c++) {                                                   \
                [[unroll]] for (uint h = 0; h < RAW; h++) {                                                \
                    TO[j][c][h] = LOAD(row, run_of(c, HEAD / 8) * 8, h);                                   \
                }                                                                                          \
            }                                                                                              \
        }                                                                                                  \
    }
ROUND_LOADER(load_keys, raw_keys, k_load, K_TYPE, HEAD_K, K_RUNS, K_RAW)
ROUND_LOADER(load_values, raw_values, v_load, V_TYPE, HEAD_V, V_RUNS, V_RAW)

// The row's score of a key: all lanes of the key have it.
float score(vec4 key[K_RUNS][2]) {
    float s = 0.0;
    [[unroll]] for (uint c = 0; c < K_RUNS; c++) {
        float part = dot(row_q[c][0], key[c][0]) + dot(row_q[c][1], key[c][1]);
        s += has_run(c, HEAD_K / 8) ? part : 0.0;
    }
    [[unroll]] for (uint offset = 1; offset < LANES; offset *= 2) {
        s += subgroupShuffleXor(s, offset);
    }
    return p.softcap != 0.0 ? p.softcap * exact_tanh(s / p.softcap) : s;
}

// The largest score so far becomes `top`, if that is more.
void raise(float top) {
    if (top <= m) {
        return;
    }
    float keep = exp(m - top);
    m = top;
    l *= keep;
    [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
        o[c][0] *= keep;
        o[c][1] *= keep;
    }
}

// Adds a value with its score, which is no more than m.
void add_value(float s, vec4 value[V_RUNS][2]) {
    float weight = s == MASKED ? 0.0 : exp(s - m);
    l += weight;
    [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
        o[c][0] += weight * value[c][0];
        o[c][1] += weight * value[c][1];
    }
}

bool sees(ivec2 seen, uint cell) { return seen.x <= int(cell) && int(cell) <= seen.y; }

// Adds the round of old cells from `first` on, which was loaded, and loads the next.
void add_round(uint first, ivec2 seen) {
    float s[KEYS];
    float top = m;
    [[unroll]] for (uint j = 0; j < KEYS; j++) {
        vec4 key[K_RUNS][2];
        [[unroll]] for (uint c = 0; c < K_RUNS; c++) {
            uint i = run_of(c, HEAD_K / 8) * 8;
            kv_decode8(K_TYPE, i, raw_keys[j][c][0], raw_keys[j][c][K_RAW - 1], key[c][0], key[c][1]);
        }
        s[j] = score(key);
        s[j] = sees(seen, cell_of(first, j)) ? s[j] : MASKED;
        top = max(top, s[j]);
    }
    load_keys(first + ROUND);
    raise(top);
    [[unroll]] for (uint j = 0; j < KEYS; j++) {
        vec4 value[V_RUNS][2];
        [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
            uint i = run_of(c, HEAD_V / 8) * 8;
            kv_decode8(V_TYPE, i, raw_values[j][c][0], raw_values[j][c][V_RAW - 1], value[c][0], value[c][1]);
        }
        add_value(s[j], value);
    }
    load_values(first + ROUND);
}

// Adds new cells from the first + 1st on, one for each group of lanes.
void add_new(uint first, ivec2 seen) {
    uint i = min(first + key_group(), n_new() - 1);
    vec4 key[K_RUNS][2];
    vec4 value[V_RUNS][2];
    [[unroll]] for (uint c = 0; c < K_RUNS; c++) {
        uint at = NEW_K_AT + i * K4 + run_of(c, HEAD_K / 8) * 2;
        key[c] = vec4[2](pool[at], pool[at + 1]);
    }
    [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
        uint at = NEW_V_AT + i * V4 + run_of(c, HEAD_V / 8) * 2;
        value[c] = vec4[2](pool[at], pool[at + 1]);
    }
    float s = score(key);
    s = sees(seen, uint(n_old) + first + key_group()) ? s : MASKED;
    raise(s);
    add_value(s, value);
}

// The cells of the cache, of which the first round is loaded, then the new ones.
void add_all_cells() {
    uint row = gl_SubgroupID;
    [[unroll]] for (uint c = 0; c < K_RUNS; c++) {
        row_q[c][0] = pool[row * K4 + run_of(c, HEAD_K / 8) * 2];
        row_q[c][1] = pool[row * K4 + run_of(c, HEAD_K / 8) * 2 + 1];
    }
    [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
        o[c] = vec4[2](vec4(0.0), vec4(0.0));
    }
    m = MASKED;
    l = 0.0;
    if (HAS_SINKS && gl_WorkGroupID.z == 0 && key_group() == 0) { // a score without a value
        m = F32s(p.sinks).f[out_row(row) % p.n_head];
        l = 1.0;
    }
    uint position = positions[token_of(row)];
    int first_seen = max(int(window_start(position) - begin), 0);
    for (uint first = 0; first < uint(n_old); first += ROUND) {
        add_round(first, ivec2(first_seen, n_old - 1));
    }
    for (uint first = 0; first < n_new(); first += GROUPS) {
        add_new(first, ivec2(first_seen, min(int(position - begin), n_cells - 1)));
    }
    // Joins the groups of lanes; all of them have the result.
    for (uint offset = LANES; offset < SUBGROUP; offset *= 2) {
        raise(subgroupShuffleXor(m, offset));
        l += subgroupShuffleXor(l, offset);
        [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
            [[unroll]] for (uint h = 0; h < 2; h++) {
                o[c][h] += subgroupShuffleXor(o[c][h], offset);
            }
        }
    }
}

uint n_out_rows() { return p.n_tokens * p.n_head; }

// The row's sums, as the split's results or the results themselves.
void store() {
    if (first_row + gl_SubgroupID >= n_rows || key_group() != 0) {
        return;
    }
    uint row = out_row(gl_SubgroupID);
    uint at = gl_WorkGroupID.z * n_out_rows() + row;
    [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
        if (!has_run(c, HEAD_V / 8)) {
            continue;
        }
        uint i = run_of(c, HEAD_V / 8) * 2;
        [[unroll]] for (uint h = 0; h < 2; h++) {
            if (p.n_splits == 1) {
                result[row * V4 + i + h] = o[c][h] / l;
            } else {
                partial4[at * V4 + i + h] = o[c][h];
            }
        }
    }
    if (p.n_splits > 1 && key_lane() == 0) {
        uint to = p.n_splits * n_out_rows() * HEAD_V + at * 2;
        partial[to] = m;
        partial[to + 1] = l;
    }
}

// A row's share of each split: exp(m - M) / sum(exp(m - M) l). By one subgroup.
void find_shares(uint row) {
    uint at = p.n_splits * n_out_rows() * HEAD_V + out_row(row) * 2;
    float top = MASKED;
    float weights = 0.0;
    for (uint s = gl_SubgroupInvocationID; s < p.n_splits; s += SUBGROUP) {
        uint from = at + s * n_out_rows() * 2;
        float split_top = partial[from];
        float most = max(top, split_top);
        weights = weights * exp(top - most) + partial[from + 1] * exp(split_top - most);
        top = most;
        split_share[row * MAX_SPLITS + s] = split_top;
    }
    float most = subgroupMax(top);
    weights = subgroupAdd(weights * exp(top - most));
    for (uint s = gl_SubgroupInvocationID; s < p.n_splits; s += SUBGROUP) {
        split_share[row * MAX_SPLITS + s] = exp(split_share[row * MAX_SPLITS + s] - most) / weights;
    }
}

// Each subgroup joins its row. (Loading the first results while shares are found takes registers that all
// workgroups then have to have: half as many fit on a unit of the H200, 26.7 to 39.3 us at 8192 cells.)
void join_splits() {
    uint row = out_row(gl_SubgroupID) * V4;
    find_shares(gl_SubgroupID);
    barrier();
    for (uint i = gl_SubgroupInvocationID; i < V4; i += SUBGROUP) {
        vec4 sum = vec4(0.0);
        for (uint first = 0; first < p.n_splits; first += JOINED_AT_ONCE) {
            vec4 part[JOINED_AT_ONCE];
            [[unroll]] for (uint j = 0; j < JOINED_AT_ONCE; j++) {
                part[j] = partial4[min(first + j, p.n_splits - 1) * n_out_rows() * V4 + row + i];
            }
            [[unroll]] for (uint j = 0; j < JOINED_AT_ONCE; j++) {
                float share = split_share[gl_SubgroupID * MAX_SPLITS + min(first + j, p.n_splits - 1)];
                sum += first + j < p.n_splits ? share * part[j] : vec4(0.0);
            }
        }
        if (first_row + gl_SubgroupID < n_rows) {
            result[row + i] = sum;
        }
    }
}

void main() {
    head_group = p.n_head / p.n_kv_head;
    n_rows = p.n_tokens * head_group;
    first_row = gl_WorkGroupID.x * ROWS;
    find_cells();
    if (n_old > 0) {
        load_keys(0);
        load_values(0);
    }
    prepare();
    encode(false);
    encode(true);
    barrier();
    add_all_cells();
    store();
    uint n_blocks = (n_rows + ROWS - 1) / ROWS;
    if (p.n_splits > 1 && is_last_of(p.n_splits, gl_WorkGroupID.y * n_blocks + gl_WorkGroupID.x)) {
        join_splits();
    }
}

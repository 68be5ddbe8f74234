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
// split of the cells. It prepares its rows and the new cells itself; new cells of its split are converted to
// the cache's type, stored, and kept in shared memory as what was stored: nothing waits for anything. It goes
// over its cells in chunks, the new ones with the last:
//   scores: KEY_LANES lanes a cell and KEYS cells of them at a time, whose loads are all on their way before the
//     first is used (a chunk's first before the rows are prepared). One read of q serves KEYS cells.
//   weights exp(s - m), with the m of all cells so far: a subgroup a row.
//   values: LANES lanes a cell, each with runs of 8 dimensions, VALUES cells at a time, likewise.
//   sums of the subgroups, in shared memory, once a chunk.
// So the scores' registers and those of sums are not needed at a time. Splits are joined by the last workgroup
// that is done, in their order.
//
// Bindings: 0 q [n_tokens][n_head][HEAD_K], 1 k [n_tokens][n_kv_head][HEAD_K], 2 v likewise with HEAD_V,
//   3 and 4 the caches of keys and values (see kv.glsl), 5 positions u32[n_tokens], one after the other,
//   6 out [n_tokens][n_head][HEAD_V], 7 partial (unless n_splits is 1): [n_splits][n_tokens][n_head][HEAD_V]
//   sum(exp(s - m) v), then likewise [2] m, sum(exp(s - m)); 8 status, then counters.
// Spec constants: 1 HEAD_K, 2 HEAD_V (multiples of 8), 3 K_TYPE, 4 V_TYPE, 5 ROWS (at most 8), 6 LANES and 7
// KEY_LANES (powers of 2, at most the subgroup), 8 KEYS, 9 VALUES, 10 CELLS of a chunk (whole rounds of the
// workgroup, of keys and of values), 11 NEW: n_tokens, 12 SUBGROUPS of the workgroup, 13 SLOTS: subgroups whose
// sums are in shared memory at a time, 14 HAS_SINKS, 15 Q_NORM, 16 K_NORM, 17 ROPE: 0 = none, 1 = pairs
// (2i, 2i+1), 2 = pairs (i, i + n_rot/2). src/exec/decode_attention.rs chooses them.
// Grid: x = blocks of ROWS of the n_tokens * G rows, y = kv head, z = split.
layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;
layout(constant_id = 3) const uint K_TYPE = KV_F16;
layout(constant_id = 4) const uint V_TYPE = KV_F16;
layout(constant_id = 5) const uint ROWS = 8;
layout(constant_id = 6) const uint LANES = 8;
layout(constant_id = 7) const uint KEY_LANES = 4;
layout(constant_id = 8) const uint KEYS = 2;
layout(constant_id = 9) const uint VALUES = 4;
layout(constant_id = 10) const uint CELLS = 256;
layout(constant_id = 11) const uint NEW = 1;
layout(constant_id = 12) const uint SUBGROUPS = 1;
layout(constant_id = 13) const uint SLOTS = 1;
layout(constant_id = 14) const bool HAS_SINKS = false;
layout(constant_id = 15) const bool Q_NORM = false;
layout(constant_id = 16) const bool K_NORM = false;
layout(constant_id = 17) const uint ROPE = 0;
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

const uint LOCAL = gl_WorkGroupSize.x;
const uint SUBGROUP = LOCAL / SUBGROUPS;

// Lengths in vec4s; a head's lanes, and the vec4s and runs of 8 dimensions that each has.
const uint K4 = HEAD_K / 4;
const uint V4 = HEAD_V / 4;
const uint GROUPS = SUBGROUP / LANES; // groups of lanes of a subgroup
const uint ALL_GROUPS = SUBGROUPS * GROUPS;
const uint K_VECS = (K4 + LANES - 1) / LANES;
const uint V_RUNS = (HEAD_V / 8 + LANES - 1) / LANES;
const uint V_RAW = kv_raw_vecs(V_TYPE);
const uint VALUE_SHARE = GROUPS * VALUES; // cells of a subgroup at a time

// The same of a cell's key, when scores are found.
const uint KEY_GROUPS = SUBGROUP / KEY_LANES;
const uint KEY_RUNS = (HEAD_K / 8 + KEY_LANES - 1) / KEY_LANES;
const uint K_RAW = kv_raw_vecs(K_TYPE);
const uint KEY_SHARE = KEY_GROUPS * KEYS;

// Sums of a lane that are added over lanes, so many that each of these gets an equal part.
const uint SCORES = (KEYS * ROWS + KEY_LANES - 1) / KEY_LANES * KEY_LANES;
const uint SUMS = (ROWS * V_RUNS * 2 + GROUPS - 1) / GROUPS * GROUPS;

// Prepared heads: the rows, then the new keys, in an order of their vec4s in which neighbouring lanes read
// neighbouring ones; then new values.
const uint HEADS = ROWS + NEW;
const uint HEAD_BLOCK = 2 * KEY_LANES;
const uint HEAD4 = (K4 + HEAD_BLOCK - 1) / HEAD_BLOCK * HEAD_BLOCK;
const uint NEW_V_AT = HEADS * HEAD4;
shared vec4 pool[NEW_V_AT + NEW * V4];
// By row: scores and weights of the new cells, then of a chunk's; at last a row's share of each split.
const uint OLD_AT = (NEW + 3) / 4 * 4;
const uint COLUMNS = OLD_AT + CELLS;
shared float scores[ROWS * (COLUMNS > MAX_SPLITS ? COLUMNS : MAX_SPLITS)];
// Sums of subgroups; before them cos and sin by token and pair.
const uint SLOT_VECS = SLOTS * ROWS * V4;
const uint ANGLE_VECS = ROPE == 0 ? 0 : NEW * K4;
shared vec4 slots[SLOT_VECS > ANGLE_VECS ? SLOT_VECS : ANGLE_VECS];
shared float row_scale[ROWS]; // what a chunk leaves of earlier sums
shared float row_m[ROWS];
shared float row_l[ROWS];

// What this workgroup works on. Cells are counted from its first.
uint n_rows;
uint first_row;
uint head_group; // query heads of a kv head
uint position;   // of the first token
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
uint window_start(uint at) { return p.window == 0 || at < p.window ? 0 : at + 1 - p.window; }

void find_cells() {
    position = positions[0];
    uint first = window_start(position);
    uint last = position + p.n_tokens;
    // Whole rounds of a subgroup, so that all splits but the last have their lanes full.
    uint size = ((last - first + p.n_splits - 1) / p.n_splits + KEY_SHARE - 1) / KEY_SHARE * KEY_SHARE;
    begin = min(first + gl_WorkGroupID.z * size, last);
    uint end = min(begin + size, last);
    uint new_begin = clamp(position, begin, end);
    n_cells = int(end - begin);
    n_old = int(new_begin - begin);
    new_token = new_begin - position;
}

// Which invocation of the workgroup this is, which of its groups of lanes it is in, and as which lane.
uint invocation() { return gl_SubgroupID * SUBGROUP + gl_SubgroupInvocationID; }
uint group() { return gl_SubgroupID * GROUPS + gl_SubgroupInvocationID / LANES; }
uint lane() { return gl_SubgroupInvocationID % LANES; }
// Part r of the lane's, of n that a head has; past the end the last one.
bool has_run(uint r, uint n) { return n % LANES == 0 || lane() + r * LANES < n; }
uint run_of(uint r, uint n) { return has_run(r, n) ? lane() + r * LANES : n - 1; }

// The same when scores are found.
uint key_lane() { return gl_SubgroupInvocationID % KEY_LANES; }
uint key_group() { return gl_SubgroupInvocationID / KEY_LANES; }
bool has_key_run(uint r) { return HEAD_K / 8 % KEY_LANES == 0 || key_lane() + r * KEY_LANES < HEAD_K / 8; }
uint key_run(uint r) { return has_key_run(r) ? key_lane() + r * KEY_LANES : HEAD_K / 8 - 1; }

// Where vec4 i of a prepared head is in the pool.
uint head_at(uint head, uint i) {
    uint block = head * HEAD4 + i / HEAD_BLOCK * HEAD_BLOCK;
    return block + i % 2 * KEY_LANES + i / 2 % KEY_LANES;
}

// A row of the cache: the workgroup's head of a cell of the split.
uint cache_row(int cell) { return (begin + uint(cell)) * p.n_kv_head + gl_WorkGroupID.y; }

// The lane's runs of KEYS keys of the cache, as they are there, the subgroup's from cell `first` on.
uvec4 key_raw[KEYS * KEY_RUNS * K_RAW];
void load_keys(int first) {
    [[unroll]] for (uint j = 0; j < KEYS; j++) {
        uint row = cache_row(min(first + int(j * KEY_GROUPS + key_group()), n_old - 1));
        [[unroll]] for (uint c = 0; c < KEY_RUNS; c++) {
            [[unroll]] for (uint h = 0; h < K_RAW; h++) {
                key_raw[(j * KEY_RUNS + c) * K_RAW + h] = k_load(row * kv_row_bytes(K_TYPE, HEAD_K), key_run(c) * 8, h);
            }
        }
    }
}

// Likewise of VALUES values, the subgroup's from cell `first` on.
uvec4 value_raw[VALUES * V_RUNS * V_RAW];
void load_values(int first) {
    int cell = first + int(gl_SubgroupInvocationID / LANES * VALUES);
    [[unroll]] for (uint j = 0; j < VALUES; j++) {
        uint row = cache_row(min(cell + int(j), n_old - 1));
        [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
            [[unroll]] for (uint h = 0; h < V_RAW; h++) {
                uint at = (j * V_RUNS + c) * V_RAW + h;
                value_raw[at] = v_load(row * kv_row_bytes(V_TYPE, HEAD_V), run_of(c, HEAD_V / 8) * 8, h);
            }
        }
    }
}

// A head of q or k, by a group of lanes.
vec4 head_x[K_VECS];
void load_head(uint i) {
    bool is_q = i < ROWS;
    uint head = is_q ? out_row(i) : (i - ROWS) * p.n_kv_head + gl_WorkGroupID.y;
    [[unroll]] for (uint c = 0; c < K_VECS; c++) {
        head_x[c] = is_q ? q[head * K4 + run_of(c, K4)] : k[head * K4 + run_of(c, K4)];
    }
}

// Its norm and q's factor, into the pool.
void norm_head(uint i) {
    bool is_q = i < ROWS;
    float factor = is_q ? p.scale : 1.0;
    if (is_q ? Q_NORM : K_NORM) {
        F32s norm = F32s(is_q ? p.q_norm : p.k_norm);
        float squares = 0.0;
        [[unroll]] for (uint c = 0; c < K_VECS; c++) {
            squares += has_run(c, K4) ? dot(head_x[c], head_x[c]) : 0.0;
            uint d = run_of(c, K4) * 4;
            head_x[c] *= vec4(norm.f[d], norm.f[d + 1], norm.f[d + 2], norm.f[d + 3]);
        }
        [[unroll]] for (uint offset = LANES / 2; offset > 0; offset /= 2) {
            squares += subgroupShuffleXor(squares, offset);
        }
        factor /= sqrt(squares / float(HEAD_K) + p.eps);
    }
    [[unroll]] for (uint c = 0; c < K_VECS; c++) {
        pool[head_at(i, run_of(c, K4))] = head_x[c] * factor;
    }
}

// A pair of dimensions of a prepared head.
void turn(uint head, uint pair, uint angle) {
    vec2 cs = vec2(slots[angle / 2][angle % 2 * 2], slots[angle / 2][angle % 2 * 2 + 1]);
    uint a = p.rot_offset + (ROPE == 1 ? 2 * pair : pair);
    uint b = a + (ROPE == 1 ? 1 : p.n_rot / 2);
    uint at = head_at(head, a / 4);
    uint bt = head_at(head, b / 4);
    vec2 x = vec2(pool[at][a % 4], pool[bt][b % 4]);
    pool[at][a % 4] = x.x * cs.x - x.y * cs.y;
    pool[bt][b % 4] = x.x * cs.y + x.y * cs.x;
}

// The rows and the new keys, the first of which is on its way, and, from the last invocation on, angles and new
// values: of all tokens, since that waits for nothing.
void prepare() {
    for (uint i = LOCAL - 1 - invocation(); i < NEW * V4; i += LOCAL) {
        pool[NEW_V_AT + i] = v[(i / V4 * p.n_kv_head + gl_WorkGroupID.y) * V4 + i % V4];
    }
    uint n_pairs = ROPE == 0 ? 0 : p.n_rot / 2;
    for (uint i = LOCAL - 1 - invocation(); i < NEW * n_pairs; i += LOCAL) {
        precise float theta = float(position + i / n_pairs) * F32s(p.freqs).f[i % n_pairs];
        vec2 cs = cos_sin(theta) * p.mscale;
        slots[i / 2][i % 2 * 2] = cs.x;
        slots[i / 2][i % 2 * 2 + 1] = cs.y;
    }
    for (uint i = group(); i < HEADS; i += ALL_GROUPS) {
        if (i >= ALL_GROUPS) {
            load_head(i);
        }
        norm_head(i);
    }
    barrier();
    if (ROPE != 0) {
        for (uint i = invocation(); i < HEADS * n_pairs; i += LOCAL) {
            uint head = i / n_pairs;
            uint pair = i % n_pairs;
            turn(head, pair, (head < ROWS ? token_of(head) : head - ROWS) * n_pairs + pair);
        }
        barrier();
    }
}

// New cells become what the cache has of them; of the workgroups with the same cells the first stores them.
bool encodes_v;
uint pool_at(uint row, uint i) { return encodes_v ? NEW_V_AT + row * V4 + i / 4 : head_at(ROWS + row, i / 4); }
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
        uint cell = i / units;
        kv_encode(type, head, new_token + cell, i % units, cache_row(n_old + int(cell)));
    }
}

// Adds n values x of each lane over COUNT lanes that are STEP apart: halves of them exchange halves of the values,
// until lane i of them has the sums of values i * n/COUNT and following. One level of that; n is a multiple of
// COUNT, which is at most 64.
#define FOLD(x, n, COUNT, STEP, level)                                                                     \
    if (COUNT >> level > 1) {                                                                              \
        bool upper = (gl_SubgroupInvocationID / (STEP) & (COUNT >> (level + 1))) != 0;                     \
        [[unroll]] for (uint i = 0; i < n >> (level + 1); i++) {                                           \
            x[i] = (upper ? x[i + (n >> (level + 1))] : x[i]) + subgroupShuffleXor(                        \
                upper ? x[i] : x[i + (n >> (level + 1))], STEP * (COUNT >> (level + 1)));                  \
        }                                                                                                  \
    }
#define FOLD_ALL(x, n, COUNT, STEP)                                                                        \
    FOLD(x, n, COUNT, STEP, 0)                                                                             \
    FOLD(x, n, COUNT, STEP, 1)                                                                             \
    FOLD(x, n, COUNT, STEP, 2)                                                                             \
    FOLD(x, n, COUNT, STEP, 3)                                                                             \
    FOLD(x, n, COUNT, STEP, 4)                                                                             \
    FOLD(x, n, COUNT, STEP, 5)

// The scores of the keys that were loaded, cells `first` and following of the chunk.
void score_keys(uint first) {
    float s[SCORES];
    [[unroll]] for (uint i = 0; i < SCORES; i++) {
        s[i] = 0.0;
    }
    [[unroll]] for (uint c = 0; c < KEY_RUNS; c++) {
        vec4 lo[KEYS];
        vec4 hi[KEYS];
        [[unroll]] for (uint j = 0; j < KEYS; j++) {
            uint at = (j * KEY_RUNS + c) * K_RAW;
            kv_decode8(K_TYPE, key_run(c) * 8, key_raw[at], key_raw[at + K_RAW - 1], lo[j], hi[j]);
            lo[j] = has_key_run(c) ? lo[j] : vec4(0.0);
            hi[j] = has_key_run(c) ? hi[j] : vec4(0.0);
        }
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            vec4 a = pool[head_at(r, key_run(c) * 2)];
            vec4 b = pool[head_at(r, key_run(c) * 2 + 1)];
            [[unroll]] for (uint j = 0; j < KEYS; j++) {
                [[unroll]] for (uint i = 0; i < 4; i++) {
                    s[j * ROWS + r] += a[i] * lo[j][i];
                    s[j * ROWS + r] += b[i] * hi[j][i];
                }
            }
        }
    }
    FOLD_ALL(s, SCORES, KEY_LANES, 1)
    [[unroll]] for (uint i = 0; i < SCORES / KEY_LANES; i++) {
        uint own = key_lane() * (SCORES / KEY_LANES) + i;
        uint cell = first + own / ROWS * KEY_GROUPS + key_group();
        if (own < KEYS * ROWS) {
            scores[own % ROWS * COLUMNS + OLD_AT + cell] = s[i];
        }
    }
}

// The new cells' scores, a group of lanes each.
void score_new() {
    for (uint i = group(); i < n_new() * ROWS; i += ALL_GROUPS) {
        uint cell = i / ROWS;
        float s = 0.0;
        [[unroll]] for (uint c = 0; c < K_VECS; c++) {
            uint d = run_of(c, K4);
            float part = dot(pool[head_at(i % ROWS, d)], pool[head_at(ROWS + new_token + cell, d)]);
            s += has_run(c, K4) ? part : 0.0;
        }
        [[unroll]] for (uint offset = LANES / 2; offset > 0; offset /= 2) {
            s += subgroupShuffleXor(s, offset);
        }
        if (lane() == 0) {
            scores[i % ROWS * COLUMNS + cell] = s;
        }
    }
}

// Of the subgroup's rows: the largest score so far, and the lane's part of sum(exp(s - m)).
const uint OWN_ROWS = (ROWS + SUBGROUPS - 1) / SUBGROUPS;
const uint SPANS = (COLUMNS + SUBGROUP - 1) / SUBGROUP;
float m[OWN_ROWS];
float l[OWN_ROWS];

// The cell of a column of scores, n_cells if it has none: the chunk has n of the cache from `start` on.
int cell_of(uint column, int start, uint n, bool is_last) {
    if (column < OLD_AT) {
        return is_last ? n_old + int(column) : n_cells;
    }
    return column < OLD_AT + n ? start + int(column - OLD_AT) : n_cells;
}

// The scores of a row become weights, 0 for those it does not see.
void find_row_weights(uint row, inout float top, inout float sum, int start, uint n, bool is_last) {
    uint at = position + token_of(row);
    int first_seen = int(window_start(at)) - int(begin);
    int last_seen = min(int(at) - int(begin), n_cells - 1);
    // Those that values are added with: whole shares.
    uint n_columns = OLD_AT + (n + VALUE_SHARE - 1) / VALUE_SHARE * VALUE_SHARE;
    float x[SPANS];
    float most = top;
    [[unroll]] for (uint i = 0; i < SPANS; i++) {
        uint column = i * SUBGROUP + gl_SubgroupInvocationID;
        x[i] = MASKED;
        if (i * SUBGROUP < n_columns) {
            int cell = cell_of(column, start, n, is_last);
            float s = scores[row * COLUMNS + min(column, COLUMNS - 1)];
            if (p.softcap != 0.0) {
                s = p.softcap * exact_tanh(s / p.softcap);
            }
            x[i] = first_seen <= cell && cell <= last_seen ? s : MASKED;
            most = max(most, x[i]);
        }
    }
    most = subgroupMax(most);
    float scale = exp(top - most);
    sum *= scale;
    [[unroll]] for (uint i = 0; i < SPANS; i++) {
        uint column = i * SUBGROUP + gl_SubgroupInvocationID;
        float weight = x[i] == MASKED ? 0.0 : exp(x[i] - most);
        sum += weight;
        if (column < min(n_columns, COLUMNS)) {
            scores[row * COLUMNS + column] = weight;
        }
    }
    top = most;
    float all = is_last ? subgroupAdd(sum) : 0.0;
    if (gl_SubgroupInvocationID == 0) {
        row_scale[row] = scale;
        row_m[row] = most;
        row_l[row] = all;
    }
}

void find_weights(int start, uint n, bool is_last) {
    [[unroll]] for (uint i = 0; i < OWN_ROWS; i++) {
        uint row = gl_SubgroupID + i * SUBGROUPS;
        if (row < ROWS) {
            find_row_weights(row, m[i], l[i], start, n, is_last);
        }
    }
}

// Of a chunk and the lane's cells: sum(exp(s - m) v), by row, run and half of it.
vec4 o[SUMS];

// Adds a run of a value, weighted by a column of scores.
void add_value(uint column, uint c, vec4 lo, vec4 hi) {
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        float weight = scores[r * COLUMNS + column];
        o[(r * V_RUNS + c) * 2] += weight * lo;
        o[(r * V_RUNS + c) * 2 + 1] += weight * hi;
    }
}

// Adds the values that were loaded, cells `first` and following of the chunk.
void add_values(uint first) {
    uint column = OLD_AT + first + gl_SubgroupInvocationID / LANES * VALUES;
    [[unroll]] for (uint j = 0; j < VALUES; j++) {
        [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
            uint at = (j * V_RUNS + c) * V_RAW;
            vec4 lo;
            vec4 hi;
            kv_decode8(V_TYPE, run_of(c, HEAD_V / 8) * 8, value_raw[at], value_raw[at + V_RAW - 1], lo, hi);
            add_value(column + j, c, lo, hi);
        }
    }
}

void add_new_values() {
    for (uint i = group(); i < n_new(); i += ALL_GROUPS) {
        [[unroll]] for (uint c = 0; c < V_RUNS; c++) {
            uint at = NEW_V_AT + (new_token + i) * V4 + run_of(c, HEAD_V / 8) * 2;
            add_value(i, c, pool[at], pool[at + 1]);
        }
    }
}

// The subgroup's sums into a slot, or added to what is there.
void put_sums(bool adds) {
    FOLD_ALL(o, SUMS, GROUPS, LANES)
    [[unroll]] for (uint i = 0; i < SUMS / GROUPS; i++) {
        uint own = gl_SubgroupInvocationID / LANES * (SUMS / GROUPS) + i;
        uint row = own / (V_RUNS * 2);
        uint c = own / 2 % V_RUNS;
        uint at = (gl_SubgroupID % SLOTS * ROWS + row) * V4 + run_of(c, HEAD_V / 8) * 2 + own % 2;
        if (row < ROWS && has_run(c, HEAD_V / 8)) {
            slots[at] = adds ? slots[at] + o[i] : o[i];
        }
    }
}

// The split's sums: of the rows' vec4s, those from invocation() on.
const uint ITEMS = (ROWS * V4 + LOCAL - 1) / LOCAL;
vec4 total[ITEMS];

// Adds the sums of the first n subgroups.
void join_subgroups(uint n) {
    for (uint turn = 0; turn * SLOTS < n; turn++) {
        if (gl_SubgroupID < n && gl_SubgroupID / SLOTS == turn) {
            put_sums(turn > 0);
        }
        barrier();
    }
    [[unroll]] for (uint i = 0; i < ITEMS; i++) {
        uint item = min(invocation() + i * LOCAL, ROWS * V4 - 1);
        total[i] *= row_scale[item / V4];
        [[unroll]] for (uint slot = 0; slot < SLOTS; slot++) {
            total[i] += slot < n ? slots[slot * ROWS * V4 + item] : vec4(0.0);
        }
    }
}

void clear() {
    [[unroll]] for (uint i = 0; i < OWN_ROWS; i++) {
        m[i] = MASKED;
        l[i] = 0.0;
        if (HAS_SINKS && gl_WorkGroupID.z == 0) { // a score without a value
            m[i] = F32s(p.sinks).f[out_row(min(gl_SubgroupID + i * SUBGROUPS, ROWS - 1)) % p.n_head];
            l[i] = gl_SubgroupInvocationID == 0 ? 1.0 : 0.0;
        }
    }
    [[unroll]] for (uint i = 0; i < ITEMS; i++) {
        total[i] = vec4(0.0);
    }
}

// A chunk, n cells of the cache from `start` on; the subgroup's first keys are loaded.
void add_chunk(int start, uint n, bool is_last) {
    for (uint i = gl_SubgroupID * KEY_SHARE; i < n; i += SUBGROUPS * KEY_SHARE) {
        score_keys(i);
        if (i + SUBGROUPS * KEY_SHARE < n) {
            load_keys(start + int(i + SUBGROUPS * KEY_SHARE));
        }
    }
    if (is_last) {
        score_new();
    }
    uint first_value = gl_SubgroupID * VALUE_SHARE;
    if (first_value < n) {
        load_values(start + int(first_value));
    }
    barrier();
    find_weights(start, n, is_last);
    barrier();
    [[unroll]] for (uint i = 0; i < SUMS; i++) {
        o[i] = vec4(0.0);
    }
    for (uint i = first_value; i < n; i += SUBGROUPS * VALUE_SHARE) {
        add_values(i);
        if (i + SUBGROUPS * VALUE_SHARE < n) {
            load_values(start + int(i + SUBGROUPS * VALUE_SHARE));
        }
    }
    if (is_last) {
        add_new_values();
    }
    uint n_with_new = is_last ? (n_new() + GROUPS - 1) / GROUPS : 0;
    join_subgroups(clamp(max(n_with_new, (n + VALUE_SHARE - 1) / VALUE_SHARE), 1, SUBGROUPS));
}

// The first keys of a subgroup in the chunk from `start` on, if it has any.
void load_first_keys(int start) {
    int first = start + int(gl_SubgroupID * KEY_SHARE);
    if (first < n_old) {
        load_keys(first);
    }
}

uint n_out_rows() { return p.n_tokens * p.n_head; }

// A total, as the result itself or the split's, which starts at row `split`.
void store_item(uint item, uint split, vec4 sum) {
    uint row = item / V4;
    if (p.n_splits == 1) {
        result[out_row(row) * V4 + item % V4] = sum / row_l[row];
        return;
    }
    uint at = split + out_row(row);
    partial4[at * V4 + item % V4] = sum;
    if (item % V4 == 0) {
        uint to = p.n_splits * n_out_rows() * HEAD_V + at * 2;
        partial[to] = row_m[row];
        partial[to + 1] = row_l[row];
    }
}

void store() {
    [[unroll]] for (uint i = 0; i < ITEMS; i++) {
        uint item = invocation() + i * LOCAL;
        if (item < min(ROWS, n_rows - first_row) * V4) {
            store_item(item, gl_WorkGroupID.z * n_out_rows(), total[i]);
        }
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
        scores[row * MAX_SPLITS + s] = split_top;
    }
    float most = subgroupMax(top);
    weights = subgroupAdd(weights * exp(top - most));
    for (uint s = gl_SubgroupInvocationID; s < p.n_splits; s += SUBGROUP) {
        scores[row * MAX_SPLITS + s] = exp(scores[row * MAX_SPLITS + s] - most) / weights;
    }
}

// An item of the rows' results in the splits from `first` on.
vec4 parts[JOINED_AT_ONCE];
void load_parts(uint item, uint first) {
    uint at = out_row(item / V4) * V4 + item % V4;
    [[unroll]] for (uint j = 0; j < JOINED_AT_ONCE; j++) {
        parts[j] = partial4[min(first + j, p.n_splits - 1) * n_out_rows() * V4 + at];
    }
}

void join_splits() {
    uint n_items = min(ROWS, n_rows - first_row) * V4;
    load_parts(min(invocation(), n_items - 1), 0);
    for (uint r = gl_SubgroupID; r < ROWS; r += SUBGROUPS) {
        find_shares(r);
    }
    barrier();
    for (uint item = invocation(); item < n_items; item += LOCAL) {
        vec4 sum = vec4(0.0);
        for (uint first = 0; first < p.n_splits; first += JOINED_AT_ONCE) {
            if (item >= LOCAL || first > 0) {
                load_parts(item, first);
            }
            [[unroll]] for (uint j = 0; j < JOINED_AT_ONCE; j++) {
                float share = scores[item / V4 * MAX_SPLITS + min(first + j, p.n_splits - 1)];
                sum += first + j < p.n_splits ? share * parts[j] : vec4(0.0);
            }
        }
        result[out_row(item / V4) * V4 + item % V4] = sum;
    }
}

void main() {
    head_group = p.n_head / p.n_kv_head;
    n_rows = p.n_tokens * head_group;
    first_row = gl_WorkGroupID.x * ROWS;
    load_head(min(group(), HEADS - 1));
    find_cells();
    load_first_keys(0);
    prepare();
    if (n_new() > 0) {
        encode(false);
        encode(true);
        barrier();
    }
    clear();
    int n_chunks = max((n_old + int(CELLS) - 1) / int(CELLS), 1);
    for (int i = 0; i < n_chunks; i++) {
        int start = i * int(CELLS);
        add_chunk(start, uint(min(n_old - start, int(CELLS))), i + 1 == n_chunks);
        load_first_keys(start + int(CELLS));
    }
    store();
    uint n_blocks = (n_rows + ROWS - 1) / ROWS;
    if (p.n_splits > 1 && is_last_of(p.n_splits, gl_WorkGroupID.y * n_blocks + gl_WorkGroupID.x)) {
        join_splits();
    }
}

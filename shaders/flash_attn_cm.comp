#version 460
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#define khr 1
#define nv 2
#if CONVERSION == nv
#extension GL_NV_cooperative_matrix2 : require
#endif
#include "common.glsl"
#include "kv.glsl"
#include "order_key.glsl"
#include "tanh.glsl"
// flash_attn on matrix units (VK_KHR_cooperative_matrix), for many rows. See there for what is computed,
// the order of rows, splits and windows; push constants and bindings are the same.
//
// A subgroup owns SG_ROWS rows and all keys. Its scores S = Q K^T, the weights P = 2^(S - m) and the
// results O += P V stay in registers: nobody says which element of a matrix a lane holds, but a matrix
// loaded from a table of coordinates tells, and what is kept per row (m, l) is kept as a matrix too, one
// value per element, alike in all elements of a row.
//   Rows of q that f16 would not hold well are divided by a power of two, which their scores get back.
//   m, in units of log 2, is not the row's maximum, but anything that keeps weights within f16: it moves only when a weight
//   would pass 2^LIMIT, then to 2^LIFT below that maximum, and the row's sums shrink. So only few tiles
//   need maxima over whole rows.
//   l, the sum of weights, is kept per element and added up over the row at the end.
//   P must become an A operand. CONVERSION nv: there is an instruction (VK_NV_cooperative_matrix2).
//   CONVERSION khr: if A has its elements where an accumulator has them, they are copied, else they go
//   through shared memory; the coordinates tell which.
// Keys and values, as f16, go to shared memory a tile at a time; the next half tile's loads run while
// this one is multiplied.
//
// Specialization: 1 HEAD_K, 2 HEAD_V (multiples of 8), 3 K_TYPE, 4 V_TYPE (not f32), 5 HAS_SINKS,
//   6 HAS_SOFTCAP, 7 MM, 8 MN: a matrix product is MM x MN x MN (multiples of 8), 9 SUBGROUPS, all full,
//   10 ROW_BLOCKS: matrices below each other of a subgroup, 11 BC: keys of a tile, a multiple of MN,
//   12 Q_IN_REGISTERS, else in shared memory, 13 ONE_TILE: keys and values take turns in the same shared
//   memory, 14 FETCH_AHEAD, 15 P_IN_REGISTERS (khr): if layouts allow, 16 LOCKSTEP: a subgroup's lanes run in
//   step, see sync_subgroup. src/exec/attention.rs chooses them.
// Grid: as flash_attn, with BR = SUBGROUPS * ROW_BLOCKS * MM.
layout(constant_id = 1) const uint HEAD_K = 64;
layout(constant_id = 2) const uint HEAD_V = 64;
layout(constant_id = 3) const uint K_TYPE = KV_F16;
layout(constant_id = 4) const uint V_TYPE = KV_F16;
layout(constant_id = 5) const uint HAS_SINKS = 0;
layout(constant_id = 6) const uint HAS_SOFTCAP = 0;
layout(constant_id = 7) const uint MM = 16;
layout(constant_id = 8) const uint MN = 16;
layout(constant_id = 9) const uint SUBGROUPS = 4;
layout(constant_id = 10) const uint ROW_BLOCKS = 1;
layout(constant_id = 11) const uint BC = 32;
layout(constant_id = 12) const uint Q_IN_REGISTERS = 1;
layout(constant_id = 13) const uint ONE_TILE = 0;
layout(constant_id = 14) const uint FETCH_AHEAD = 1;
layout(constant_id = 15) const uint P_IN_REGISTERS = 1;
layout(constant_id = 16) const uint LOCKSTEP = 0;
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
layout(binding = 1, std430) readonly buffer KU4 { uvec4 k_u4[]; };
layout(binding = 1, scalar) readonly buffer KU16 { uint16_t k_u16[]; };
layout(binding = 2, std430) readonly buffer VU4 { uvec4 v_u4[]; };
layout(binding = 2, scalar) readonly buffer VU16 { uint16_t v_u16[]; };
layout(binding = 3, scalar) readonly buffer Positions { uint positions[]; };
layout(binding = 4, std430) writeonly buffer Out { vec4 result[]; };
layout(binding = 5, scalar) writeonly buffer Partial { float partial[]; };

const uint THREADS = gl_WorkGroupSize.x;
const uint LANES = THREADS / SUBGROUPS;
const uint SG_ROWS = ROW_BLOCKS * MM;
const uint BR = SUBGROUPS * SG_ROWS;

// Shared memory in units of 16 bytes, 8 elements f16. Heads are padded with zeros to whole matrices; odd
// strides put the rows of a matrix on different banks.
const uint K_BLOCKS = (HEAD_K + MN - 1) / MN;
const uint V_BLOCKS = (HEAD_V + MN - 1) / MN;
const uint KEY_BLOCKS = BC / MN;
const uint K_UNITS = K_BLOCKS * MN / 8;
const uint V_UNITS = V_BLOCKS * MN / 8;
const uint K_STRIDE = K_UNITS | 1;
const uint V_STRIDE = V_UNITS | 1;
const uint K_TILE = BC * K_STRIDE;
const uint V_TILE = BC * V_STRIDE;
const uint V_AT = ONE_TILE != 0 ? 0 : K_TILE;
const uint KV_END = ONE_TILE != 0 && K_TILE > V_TILE ? K_TILE : V_AT + V_TILE;
// At the end a matrix of results for each subgroup, f32.
const uint OUT_STRIDE = MN / 4 | 1;
const uint OUT_UNITS = MM * OUT_STRIDE;
const uint OUT_END = SUBGROUPS * OUT_UNITS;
const uint TILE_END = KV_END > OUT_END ? KV_END : OUT_END;
// Rows of q: for good, or on their way to registers, as many subgroups at a time as there is room for.
const uint Q_UNITS = MM * K_STRIDE;
const uint Q_AT = Q_IN_REGISTERS != 0 ? 0 : TILE_END;
const uint Q_TURNS = Q_IN_REGISTERS != 0 ? (SUBGROUPS * Q_UNITS + TILE_END - 1) / TILE_END : 1;
const uint Q_ROOM = TILE_END / Q_UNITS;
shared uvec4 tile[Q_IN_REGISTERS != 0 ? TILE_END : TILE_END + BR * K_STRIDE];
#if CONVERSION == khr
shared float16_t weight_stage[SUBGROUPS * MM * MN];
#endif
shared float coordinates[MM * MN]; // row * MN + column
shared uint row_at[BR]; // token * n_head + head
shared uint row_position[BR];
shared uint row_key[BR];     // a maximum, as order_key; of q, as bits
shared float row_max[BR];    // m
shared float row_factor[BR]; // of scores; at the end l

const float LOG2_E = 1.4426950408889634;
const float LN_2 = 0.6931471805599453;
const float LIFT = 6.0;
const float LIMIT = 15.0;
const float NOTHING_SEEN = -1.0e38;                      // m before the first key: below every score
const uint MINUS_INFINITY = 0xff800000u;                 // a masked score; m is finite
const float F16_MAX = 65504.0;

#define Sums coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>
#define Left coopmat<float16_t, gl_ScopeSubgroup, MM, MN, gl_MatrixUseA>
#define Right coopmat<float16_t, gl_ScopeSubgroup, MN, MN, gl_MatrixUseB>

Left query[Q_IN_REGISTERS != 0 ? ROW_BLOCKS : 1][Q_IN_REGISTERS != 0 ? K_BLOCKS : 1];
Sums score[ROW_BLOCKS][KEY_BLOCKS];
Left weight[ROW_BLOCKS][KEY_BLOCKS];
Sums o[ROW_BLOCKS][V_BLOCKS];
Sums m[ROW_BLOCKS];
Sums l[ROW_BLOCKS];
uint first_row;   // of the workgroup
uint n_rows;      // of the kv head
uint group;       // heads that share the kv head
#if CONVERSION == khr
bool same_layout; // accumulators and A operands have their elements in the same places
#endif
bool has_factors; // some row of the subgroup has one

// What a thread has fetched of a tile of keys or values.
const uint K_EACH = (BC * K_UNITS + THREADS - 1) / THREADS;
const uint V_EACH = (BC * V_UNITS + THREADS - 1) / THREADS;
const uint EACH = K_EACH > V_EACH ? K_EACH : V_EACH;
uvec4 fetched[EACH]; // 8 values f16, or 16 bits of what kv_unpack8 takes in each component
uint fetched_scale[EACH];

const bool KEYS = false;
const bool VALUES = true;

uvec4 halves(vec4 lo, vec4 hi) {
    lo = clamp(lo, -F16_MAX, F16_MAX);
    hi = clamp(hi, -F16_MAX, F16_MAX);
    return uvec4(packHalf2x16(lo.xy), packHalf2x16(lo.zw), packHalf2x16(hi.xy), packHalf2x16(hi.zw));
}

// Unit d8 of a cell as it is in the cache.
uvec4 load_unit(bool values, uint cell, uint d8, out uint scale) {
    uint row = cell * p.n_kv_head + gl_WorkGroupID.y;
    uint type = values ? V_TYPE : K_TYPE;
    uint head = values ? HEAD_V : HEAD_K;
    if (type == KV_F16) {
        scale = 0;
        uint at = row * (head / 8) + d8;
        return values ? v_u4[at] : k_u4[at];
    }
    uvec2 at = kv_place8(type, row * kv_row_bytes(type, head), d8 * 8);
    if (values) {
        scale = uint(v_u16[at.x]);
        return uvec4(uint(v_u16[at.y]), uint(v_u16[at.y + 1]), uint(v_u16[at.y + 2]), uint(v_u16[at.y + 3]));
    }
    scale = uint(k_u16[at.x]);
    return uvec4(uint(k_u16[at.y]), uint(k_u16[at.y + 1]), uint(k_u16[at.y + 2]), uint(k_u16[at.y + 3]));
}

// The same as 8 values f16.
uvec4 decode_unit(uint type, uint d8, uvec4 unit, uint scale) {
    if (type == KV_F16) {
        return unit;
    }
    vec4 lo, hi;
    kv_unpack8(type, d8 * 8, scale, unit, lo, hi);
    return halves(lo, hi);
}

// Unit i of this thread in a tile of rows of `units`: which row, which unit of it. Written so that with
// whole rows a step (most head sizes) the compiler sees a constant distance.
uvec2 place(uint i, uint units) {
    uint at = gl_LocalInvocationID.x;
    if (THREADS % units == 0) {
        return uvec2(at / units + i * (THREADS / units), at % units);
    }
    at += i * THREADS;
    return uvec2(at / units, at % units);
}

// Only loads: what is computed from them would wait for them. Cells from n_cells on and units past the head
// are read in bounds and thrown away.
void fetch(bool values, uint first, uint n_cells) {
    uint units = values ? V_UNITS : K_UNITS;
    uint filled = (values ? HEAD_V : HEAD_K) / 8;
    [[unroll]] for (uint i = 0; i < (values ? V_EACH : K_EACH); ++i) {
        uvec2 at = place(i, units);
        fetched[i] = load_unit(values, min(first + at.x, n_cells - 1), min(at.y, filled - 1), fetched_scale[i]);
    }
}

// Cells from n_cells on hold nothing yet and count as zeros.
void store_fetched(bool values, uint first, uint n_cells) {
    uint units = values ? V_UNITS : K_UNITS;
    uint filled = (values ? HEAD_V : HEAD_K) / 8;
    [[unroll]] for (uint i = 0; i < (values ? V_EACH : K_EACH); ++i) {
        uvec2 at = place(i, units);
        if (BC * units % THREADS == 0 || at.x < BC) {
            bool there = first + at.x < n_cells && (filled == units || at.y < filled);
            uvec4 unit = decode_unit(values ? V_TYPE : K_TYPE, at.y, fetched[i], fetched_scale[i]);
            tile[(values ? V_AT + at.x * V_STRIDE : at.x * K_STRIDE) + at.y] = there ? unit : uvec4(0);
        }
    }
}

// Makes what lanes wrote to shared memory visible to the others of their subgroup. lavapipe (26.1) takes
// subgroupBarrier for a barrier of the workgroup, which not all subgroups come to here; its lanes run in
// step, so that memory alone needs a barrier.
void sync_subgroup() {
    if (LOCKSTEP != 0) {
        subgroupMemoryBarrierShared();
    } else {
        subgroupBarrier();
    }
}

// Row of the workgroup at which matrix r of this subgroup begins.
uint first_of_block(uint r) { return gl_SubgroupID * SG_ROWS + r * MM; }

// The power of two that a row with this largest value (as bits) is divided by: 0 for most.
int row_exponent(uint largest) {
    int e = clamp(int(largest >> 23) - 127, -40, 126);
    return largest == 0 || (e >= -8 && e < 14) ? 0 : e;
}

float power_of_2(int e) { return uintBitsToFloat(uint(e + 127) << 23); }

// Rows of q that a lane has its units of at a time, and how many units those are.
const uint Q_FIT = 8 * LANES / K_UNITS;
const uint Q_ROWS = Q_FIT < 1 ? 1 : (Q_FIT < MM ? Q_FIT : MM);
const uint Q_EACH = (Q_ROWS * K_UNITS + LANES - 1) / LANES;

// `count` rows from `row` of the workgroup on as f16, in shared memory from `at` on. Rows past the last and
// units past the head are zeros.
void stage_rows(uint row, uint count, uint at) {
    vec4 held[Q_EACH][2];
    [[unroll]] for (uint i = 0; i < Q_EACH; ++i) {
        uint unit = gl_SubgroupInvocationID + i * LANES;
        uint from = row_at[min(row + unit / K_UNITS, BR - 1)] * (HEAD_K / 4) + min(unit % K_UNITS, HEAD_K / 8 - 1) * 2;
        held[i][0] = q[from];
        held[i][1] = q[from + 1];
    }
    [[unroll]] for (uint i = 0; i < Q_EACH; ++i) {
        uint unit = gl_SubgroupInvocationID + i * LANES;
        uint to = row + unit / K_UNITS;
        bool there = first_row + to < n_rows && unit % K_UNITS < HEAD_K / 8;
        held[i][0] = there ? held[i][0] : vec4(0.0);
        held[i][1] = there ? held[i][1] : vec4(0.0);
        vec4 most = max(abs(held[i][0]), abs(held[i][1]));
        if (unit / K_UNITS < count) {
            atomicMax(row_key[to], floatBitsToUint(max(max(most.x, most.y), max(most.z, most.w))));
        }
    }
    sync_subgroup();
    [[unroll]] for (uint i = 0; i < Q_EACH; ++i) {
        uint unit = gl_SubgroupInvocationID + i * LANES;
        if (unit / K_UNITS < count) {
            float inverse = power_of_2(-row_exponent(row_key[row + unit / K_UNITS]));
            tile[at + unit / K_UNITS * K_STRIDE + unit % K_UNITS] = halves(held[i][0] * inverse, held[i][1] * inverse);
        }
    }
}

// The rows of block r as f16, in shared memory from `at` on.
void stage_queries(uint r, uint at) {
    uint base = first_of_block(r);
    [[dont_unroll]] for (uint row = 0; row < MM; row += Q_ROWS) {
        stage_rows(base + row, min(Q_ROWS, MM - row), at + row * K_STRIDE);
    }
    uint factors = 0;
    for (uint row = gl_SubgroupInvocationID; row < MM; row += LANES) {
        int e = row_exponent(row_key[base + row]);
        // A higher power would bring infinite scores, and changes no weight.
        row_factor[base + row] = power_of_2(min(e, 80));
        factors |= uint(e != 0);
    }
    has_factors = has_factors || subgroupOr(factors) != 0;
    sync_subgroup();
}

void load_queries() {
    has_factors = false;
    [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
        for (uint turn = 0; turn < Q_TURNS; ++turn) {
            if (Q_IN_REGISTERS == 0 || gl_SubgroupID / Q_ROOM == turn) {
                uint at = Q_IN_REGISTERS != 0 ? gl_SubgroupID % Q_ROOM * Q_UNITS : Q_AT + first_of_block(r) * K_STRIDE;
                stage_queries(r, at);
                [[unroll]] for (uint d = 0; d < (Q_IN_REGISTERS != 0 ? K_BLOCKS : 0); ++d) {
                    coopMatLoad(query[r][d], tile, at + d * (MN / 8), K_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
                }
            }
            if (Q_IN_REGISTERS != 0) {
                barrier();
            }
        }
    }
}

#if CONVERSION == khr
// Do the elements of an A operand lie where those of an accumulator do?
void compare_layouts() {
    same_layout = false;
    if (P_IN_REGISTERS != 0) {
        uint at = gl_SubgroupID * MM * MN;
        for (uint i = gl_SubgroupInvocationID; i < MM * MN; i += LANES) {
            weight_stage[at + i] = float16_t(i);
        }
        sync_subgroup();
        Left a;
        coopMatLoad(a, weight_stage, at, MN, gl_CooperativeMatrixLayoutRowMajor);
        Sums c;
        coopMatLoad(c, coordinates, 0, MN, gl_CooperativeMatrixLayoutRowMajor);
        bool same = a.length() == c.length();
        [[unroll]] for (uint i = 0; i < min(a.length(), c.length()); ++i) {
            same = same && float(a[i]) == c[i];
        }
        same_layout = subgroupAnd(uint(same)) != 0;
    }
}
#endif

void start_rows() {
    for (uint i = gl_LocalInvocationID.x; i < MM * MN; i += THREADS) {
        coordinates[i] = float(i);
    }
    for (uint i = gl_LocalInvocationID.x; i < BR; i += THREADS) {
        uint row = min(first_row + i, n_rows - 1);
        row_at[i] = row / group * p.n_head + gl_WorkGroupID.y * group + row % group;
        row_position[i] = positions[row / group];
        row_max[i] = NOTHING_SEEN;
        row_key[i] = 0;
    }
    [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
        m[r] = Sums(NOTHING_SEEN);
        l[r] = Sums(0.0);
        [[unroll]] for (uint n = 0; n < V_BLOCKS; ++n) {
            o[r][n] = Sums(0.0);
        }
    }
}

// S = Q K^T
void multiply_keys() {
    [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
        [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
            score[r][j] = Sums(0.0);
        }
    }
    [[unroll]] for (uint d = 0; d < K_BLOCKS; ++d) {
        Left rows[ROW_BLOCKS];
        [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
            if (Q_IN_REGISTERS != 0) {
                rows[r] = query[r][d];
            } else {
                coopMatLoad(rows[r], tile, Q_AT + first_of_block(r) * K_STRIDE + d * (MN / 8), K_STRIDE,
                    gl_CooperativeMatrixLayoutRowMajor);
            }
        }
        [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
            Right keys;
            coopMatLoad(keys, tile, j * MN * K_STRIDE + d * (MN / 8), K_STRIDE,
                gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
                score[r][j] = coopMatMulAdd(rows[r], keys, score[r][j]);
            }
        }
    }
}

// First cell that a token at a position sees.
uint window_start(uint position) {
    return p.window == 0 || position < p.window ? 0 : position + 1 - p.window;
}

// What few rows or tiles need: factors, and no sight of later keys and those before the window.
void adjust_scores(uint r, uint first, bool masked) {
    Sums places;
    coopMatLoad(places, coordinates, 0, MN, gl_CooperativeMatrixLayoutRowMajor);
    [[unroll]] for (uint i = 0; i < places.length(); ++i) {
        uint row = first_of_block(r) + uint(places[i]) / MN;
        float factor = row_factor[row];
        uint position = row_position[row];
        // Cells from begin on, so many more: all, where nothing is masked.
        uint begin = masked ? window_start(position) : 0;
        uint more = masked ? position - begin : 0xffffffffu;
        uint cell = first + uint(places[i]) % MN;
        [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
            float s = score[r][j][i] * factor;
            if (HAS_SOFTCAP != 0) {
                s = p.softcap * LOG2_E * exact_tanh(s * (p.scale / p.softcap));
            }
            score[r][j][i] = cell + j * MN - begin <= more ? s : uintBitsToFloat(MINUS_INFINITY);
        }
    }
}

float order_value(uint key) { return uintBitsToFloat(key >> 31 == 1 ? key & 0x7fffffffu : ~key); }

// Moves m up to below the rows' maxima. `most`: of each element's columns in this tile.
void raise(uint r, Sums most) {
    Sums places;
    coopMatLoad(places, coordinates, 0, MN, gl_CooperativeMatrixLayoutRowMajor);
    uint base = first_of_block(r);
    for (uint row = gl_SubgroupInvocationID; row < MM; row += LANES) {
        row_key[base + row] = 0;
    }
    sync_subgroup();
    [[unroll]] for (uint i = 0; i < most.length(); ++i) {
        atomicMax(row_key[base + uint(places[i]) / MN], order_key(most[i]));
    }
    sync_subgroup();
    for (uint row = gl_SubgroupInvocationID; row < MM; row += LANES) {
        row_max[base + row] = max(row_max[base + row], order_value(row_key[base + row]) - LIFT);
    }
    sync_subgroup();
    Sums shrink;
    [[unroll]] for (uint i = 0; i < shrink.length(); ++i) {
        float now = row_max[base + uint(places[i]) / MN];
        shrink[i] = exp2(m[r][i] - now);
        m[r][i] = now;
    }
    l[r] = l[r] * shrink;
    [[unroll]] for (uint n = 0; n < V_BLOCKS; ++n) {
        o[r][n] = o[r][n] * shrink;
    }
}

// What scores are multiplied by to be in units of log 2. A soft cap's are.
float score_unit() { return HAS_SOFTCAP != 0 ? 1.0 : p.scale * LOG2_E; }

// Scores become weights.
void soften(uint r) {
    float unit = score_unit();
    if (has_factors) {
        // Huge scores: their products must be rounded as m is, which no fused operation does.
        [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
            [[unroll]] for (uint i = 0; i < score[r][j].length(); ++i) {
                precise float rounded = score[r][j][i] * unit;
                score[r][j][i] = rounded;
            }
        }
        unit = 1.0;
    }
    Sums most = score[r][0];
    uint grows = 0;
    [[unroll]] for (uint i = 0; i < most.length(); ++i) {
        [[unroll]] for (uint j = 1; j < KEY_BLOCKS; ++j) {
            most[i] = max(most[i], score[r][j][i]);
        }
        most[i] *= unit;
        grows |= uint(most[i] > m[r][i] + LIMIT);
    }
    if (subgroupOr(grows) != 0) {
        raise(r, most);
    }
    [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
        [[unroll]] for (uint i = 0; i < most.length(); ++i) {
            score[r][j][i] = exp2(score[r][j][i] * unit - m[r][i]);
        }
        l[r] += score[r][j];
    }
}

#if CONVERSION == nv
void to_operands(uint r) {
    [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
        weight[r][j] = Left(score[r][j]);
    }
}
#else
// Two at a time, so that they are converted into one register.
void copy_weights(uint r) {
    [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
        uint last = min(score[r][j].length(), weight[r][j].length()) - 1;
        [[unroll]] for (uint i = 0; i <= last; i += 2) {
            uint next = min(i + 1, last);
            f16vec2 two = f16vec2(vec2(score[r][j][i], score[r][j][next]));
            weight[r][j][i] = two.x;
            weight[r][j][next] = next == i ? two.x : two.y;
        }
    }
}

void carry_weights(uint r) {
    Sums places;
    coopMatLoad(places, coordinates, 0, MN, gl_CooperativeMatrixLayoutRowMajor);
    uint at = gl_SubgroupID * MM * MN;
    [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
        sync_subgroup();
        [[unroll]] for (uint i = 0; i < places.length(); ++i) {
            weight_stage[at + uint(places[i])] = float16_t(score[r][j][i]);
        }
        sync_subgroup();
        coopMatLoad(weight[r][j], weight_stage, at, MN, gl_CooperativeMatrixLayoutRowMajor);
    }
}

void to_operands(uint r) {
    if (same_layout) {
        copy_weights(r);
    } else {
        carry_weights(r);
    }
}
#endif

// The weights of a tile, from its keys.
void weigh(uint first, bool masked) {
    multiply_keys();
    [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
        if (HAS_SOFTCAP != 0 || masked || has_factors) {
            adjust_scores(r, first, masked);
        }
        soften(r);
        to_operands(r);
    }
}

// O += P V
void multiply_values() {
    [[unroll]] for (uint j = 0; j < KEY_BLOCKS; ++j) {
        [[unroll]] for (uint n = 0; n < V_BLOCKS; ++n) {
            Right values;
            coopMatLoad(values, tile, V_AT + j * MN * V_STRIDE + n * (MN / 8), V_STRIDE,
                gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
                o[r][n] = coopMatMulAdd(weight[r][j], values, o[r][n]);
            }
        }
    }
}

// Adds up l over the rows of block r: the matrix in shared memory from `at` on.
void sum_rows(uint r, uint at) {
    for (uint row = gl_SubgroupInvocationID; row < MM; row += LANES) {
        vec4 sum = vec4(0.0);
        [[unroll]] for (uint c = 0; c < MN / 4; ++c) {
            sum += uintBitsToFloat(tile[at + row * OUT_STRIDE + c]);
        }
        row_factor[first_of_block(r) + row] = (sum.x + sum.y) + (sum.z + sum.w);
    }
}

// Four results of a row.
void store_results(uint block_row, uint d, vec4 sums) {
    uint at = row_at[block_row];
    float most = row_max[block_row];
    float sum = row_factor[block_row];
    if (p.n_splits == 1) {
        if (HAS_SINKS != 0) {
            sum += exp2(F32s(p.sinks).f[at % p.n_head] * LOG2_E - most);
        }
        result[(at * HEAD_V + d) / 4] = sums / sum;
        return;
    }
    uint to = (gl_WorkGroupID.z * p.n_tokens * p.n_head + at) * (HEAD_V + 2);
    [[unroll]] for (uint j = 0; j < 4; ++j) {
        partial[to + d + j] = sums[j];
    }
    if (d == 0) {
        partial[to + HEAD_V] = most * LN_2;
        partial[to + HEAD_V + 1] = sum;
    }
}

// Writes results n * MN .. of the rows of block r: the matrix in shared memory from `at` on.
void store_block(uint r, uint n, uint at) {
    const uint QUADS = MN / 4;
    for (uint i = gl_SubgroupInvocationID; i < MM * QUADS; i += LANES) {
        uint row = first_of_block(r) + i / QUADS;
        uint d = n * MN + i % QUADS * 4;
        if (first_row + row < n_rows && d < HEAD_V) {
            store_results(row, d, uintBitsToFloat(tile[at + i / QUADS * OUT_STRIDE + i % QUADS]));
        }
    }
}

// Matrix by matrix: l, then results. Only the stores to shared memory are unrolled: if all were, compilers
// that find that too long would index the matrices at run time, and keep them in memory.
void finish_rows() {
    uint at = gl_SubgroupID * OUT_UNITS;
    [[dont_unroll]] for (uint step = 0; step < ROW_BLOCKS * (V_BLOCKS + 1); ++step) {
        [[unroll]] for (uint r = 0; r < ROW_BLOCKS; ++r) {
            if (step == r * (V_BLOCKS + 1)) {
                coopMatStore(l[r], tile, at, OUT_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
            }
            [[unroll]] for (uint n = 0; n < V_BLOCKS; ++n) {
                if (step == r * (V_BLOCKS + 1) + 1 + n) {
                    coopMatStore(o[r][n], tile, at, OUT_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
                }
            }
        }
        sync_subgroup();
        uint r = step / (V_BLOCKS + 1);
        uint n = step % (V_BLOCKS + 1);
        if (n == 0) {
            sum_rows(r, at);
        } else {
            store_block(r, n - 1, at);
        }
        sync_subgroup();
    }
}

void main() {
    group = p.n_head / p.n_kv_head;
    n_rows = p.n_tokens * group;
    // The last rows see most keys: they go first, so that the others fill the gaps at the end.
    first_row = ((n_rows + BR - 1) / BR - 1 - gl_WorkGroupID.x) * BR;

    // This split's run of tiles, cut down to what the rows of this block see.
    uint first_position = positions[first_row / group];
    uint last_position = positions[(min(first_row + BR, n_rows) - 1) / group];
    uint all_begin = window_start(positions[0]) / BC;
    uint all_end = positions[p.n_tokens - 1] / BC + 1;
    uint per_split = (all_end - all_begin + p.n_splits - 1) / p.n_splits;
    uint split_begin = all_begin + gl_WorkGroupID.z * per_split;
    uint begin = max(split_begin, window_start(first_position) / BC);
    uint end = min(split_begin + per_split, last_position / BC + 1);
    uint n_cells = last_position + 1;

    if (FETCH_AHEAD != 0) {
        fetch(KEYS, begin * BC, n_cells);
    }
    start_rows();
    barrier();
#if CONVERSION == khr
    compare_layouts();
#endif
    load_queries();
    uint sg_first = row_position[first_of_block(0)];
    uint sg_last = row_position[first_of_block(0) + SG_ROWS - 1];
    bool has_rows = first_row + first_of_block(0) < n_rows;

    for (uint t = begin; t < end; ++t) {
        uint first = t * BC;
        bool sees = has_rows && first <= sg_last && first + BC > window_start(sg_first);
        if (FETCH_AHEAD == 0) {
            fetch(KEYS, first, n_cells);
        }
        store_fetched(KEYS, first, n_cells);
        barrier();
        if (FETCH_AHEAD != 0) {
            fetch(VALUES, first, n_cells);
        }
        if (sees) {
            weigh(first, first + BC - 1 > sg_first || first < window_start(sg_last));
        }
        if (FETCH_AHEAD == 0) {
            fetch(VALUES, first, n_cells);
        }
        if (ONE_TILE != 0) {
            barrier();
        }
        store_fetched(VALUES, first, n_cells);
        barrier();
        if (FETCH_AHEAD != 0) {
            fetch(KEYS, first + BC, n_cells);
        }
        if (sees) {
            multiply_values();
        }
        if (ONE_TILE != 0) {
            barrier();
        }
    }
    barrier();
    finish_rows();
}

#version 460
#include "common.glsl"
#include "weights.glsl"
// The second half of a mixture of experts for few tokens: each expert's down projection, and their
// weighted sum,
//   y[t][r] = sum over slots s of weights[t][s] * sum_k D[e][r][k] * x[t * n_used + s][k], e = ids[t][s].
// A row of y is one long product: the experts' rows r one after the other with weights[t][s] * x.
// Bindings: 0 x f32[n_tokens * n_used][k], 1 y f32[n_tokens][n], 2 ids u32[n_tokens][n_used], 3 weights
// f32[n_tokens][n_used].
// Specialization: 1 ROWS, 2 UNITS, 3 CHUNK (see mat_vec.glsl).
// Grid: x, y folded over blocks of subgroups * ROWS rows; any number of blocks is right, they stride.
// z = tokens.
layout(constant_id = 1) const uint ROWS = 1;
layout(constant_id = 2) const uint UNITS = 1;
layout(constant_id = 3) const uint CHUNK = 128;
layout(push_constant, scalar) uniform Push {
    uint64_t table; // u64[n_expert]: addresses of the experts' matrices
    uint k;
    uint n;
    uint n_used;
    uint _pad;
} p;
layout(binding = 0, scalar) readonly buffer X { float x[]; };
layout(binding = 0, std430) readonly buffer X4 { vec4 x4[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };
layout(binding = 2, scalar) readonly buffer Ids { uint ids[]; };
layout(binding = 3, scalar) readonly buffer Weights { float weights[]; };
const uint COLS = 1;
#include "mat_vec.glsl"

uint64_t row_offset[ROWS];
uint first_slot; // of the token
uint slot_units; // of one expert's row

// By lane: the units on their way are of several experts.
Unit row_unit(uint r, uint u) {
    uint slot = u / slot_units;
    uint64_t expert = U64s(p.table).u[ids[first_slot + slot]];
    return load_unit(expert + row_offset[r], u - slot * slot_units, p.k);
}
uint unit_of_row(uint u) { return u % slot_units; }

// Vectors that a thread has on their way.
const uint STAGED = 4;

void stage(uint first, uint n) {
    uint slot_vectors = slot_units * 8;
    for (uint begin = staging_thread(); begin < n; begin += STAGED * gl_WorkGroupSize.x) {
        vec4 v[STAGED];
        [[unroll]] for (uint j = 0; j < STAGED; j++) {
            // Past the end the last one again.
            uint i = first + min(begin + j * gl_WorkGroupSize.x, n - 1);
            uint slot = i / slot_vectors;
            v[j] = weights[first_slot + slot] * load_x(first_slot + slot, i - slot * slot_vectors);
        }
        [[unroll]] for (uint j = 0; j < STAGED; j++) {
            uint i = begin + j * gl_WorkGroupSize.x;
            if (i < n) {
                put_x(0, i, v[j]);
            }
        }
    }
}

void main() {
    uint token = gl_WorkGroupID.z;
    first_slot = token * p.n_used;
    slot_units = row_units(p.k);
    uint n_units = p.n_used * slot_units;
    uint block_rows = gl_NumSubgroups * ROWS;
    uint n_blocks = (p.n + block_rows - 1) / block_rows;
    uint first_block = min(grid_item(), n_blocks - 1);
    for (uint block = first_block; block < n_blocks; block += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        uint first_row = (block * gl_NumSubgroups + gl_SubgroupID) * ROWS;
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            // Rows past the last repeat it.
            row_offset[r] = uint64_t(min(first_row + r, p.n - 1)) * row_bytes(p.k);
        }
        clear_sums();
        for (uint first = 0; first < n_units; first += CHUNK_UNITS) {
            uint end = min(first + CHUNK_UNITS, n_units);
            load_first(first, end);
            if (n_units > CHUNK_UNITS || block == first_block) {
                barrier(); // earlier readers of the tile
                stage(first * 8, (end - first) * 8);
                barrier();
            }
            add_units(first, end);
        }
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            float total = subgroupAdd(sums[r][0]);
            uint n = first_row + r;
            if (subgroupElect() && n < p.n) {
                y[token * p.n + n] = total;
            }
        }
    }
}

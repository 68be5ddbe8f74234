// What kernels for few columns share: weights are read once, by whole units, and multiplied with
// activations that the workgroup holds in shared memory. Needs common.glsl and weights.glsl.
//
// A subgroup owns ROWS weight rows; its lanes take units in strides of the subgroup. UNITS of them are on their
// way while one is multiplied, by code for one: what counts is how many are on their way, and with few tokens how
// short the code is. The first ones are loaded before the activations are staged. Rows longer than CHUNK
// elements go chunk by chunk.
//
// What that memory holds is the matter of two files, of which the macro ACTIVATIONS chooses:
//   void put_x(uint c, uint i, vec4 v)   stores elements 4 i .. 4 i + 3 of a chunk's column c
//   uint tile_unit(uint u)               where a unit begins, in the tile's first column
//   void add_run(uint u, uint j, uint at, bool valid)
//                                        adds run j of the lane's unit that is next, u of its row and at `at`
//
// The includer has the specialization constants COLS, ROWS, UNITS, CHUNK (a multiple of 128); the push
// constant k; activations in rows of k as x[] and x4[]; and defines
//   Unit row_unit(uint r, uint u)   loads unit u of weight row r of this subgroup's
//   uint unit_of_row(uint u)        which unit of its row that is

const uint CHUNK_UNITS = CHUNK / 32;

Unit row_unit(uint r, uint u);
uint unit_of_row(uint u);

Unit units[UNITS][ROWS]; // the next ones, in their order
float sums[ROWS][COLS];

void clear_sums() {
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            sums[r][c] = 0.0;
        }
    }
}

// The lane's unit of those from `first` on; lanes past the end repeat the last one.
uint lane_unit(uint first, uint end) { return min(first + gl_SubgroupInvocationID, end - 1); }

void load_units(uint i, uint first, uint end) {
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        units[i][r] = row_unit(r, lane_unit(first, end));
    }
}

// Loads the first of units first..end of all rows.
void load_first(uint first, uint end) {
    [[unroll]] for (uint i = 0; i < UNITS; i++) {
        load_units(i, first + i * gl_SubgroupSize, end);
    }
}

// Threads in the order of subgroups and their lanes.
uint staging_thread() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }

// Elements 4 i .. 4 i + 3 of a row of x, zeros past its end.
vec4 load_x(uint row, uint i) {
    uint at = row * p.k + i * 4;
    if (QUANT_BLOCK > 1 || (p.k & 3) == 0) {
        return i * 4 < p.k ? x4[min(at, row * p.k + p.k - 4) / 4] : vec4(0.0);
    }
    vec4 v;
    [[unroll]] for (uint j = 0; j < 4; j++) {
        v[j] = i * 4 + j < p.k ? x[min(at + j, row * p.k + p.k - 1)] : 0.0;
    }
    return v;
}

#ifdef ACTIVATIONS
#include "tile_int16.glsl"
#else
#include "tile_f32.glsl"
#endif

// Adds units first..end of all rows, of which the first are loaded. The tile begins with unit `first`.
void add_units(uint first, uint end) {
    for (uint next = first; next < end; next += gl_SubgroupSize) {
        uint u = lane_unit(next, end);
        uint at = tile_unit(u - first);
        [[unroll]] for (uint j = 0; j < RUNS; j++) {
            add_run(u, j, at, next + gl_SubgroupInvocationID < end);
        }
        [[unroll]] for (uint i = 1; i < UNITS; i++) {
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                units[i - 1][r] = units[i][r];
            }
        }
        if (next + UNITS * gl_SubgroupSize < end) {
            load_units(UNITS - 1, next + UNITS * gl_SubgroupSize, end);
        }
    }
}

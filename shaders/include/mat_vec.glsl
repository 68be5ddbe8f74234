// What kernels for few columns share: weights are read once, by whole units, and multiplied with
// activations that the workgroup holds in shared memory. Needs common.glsl and weights.glsl.
//
// A subgroup owns ROWS weight rows; its lanes take units in strides of the subgroup, UNITS at a time, all
// loads of which are issued before the first is used: what counts is how many are on their way. For the
// same reason the first ones are loaded before the activations are staged. Rows longer than CHUNK elements
// go chunk by chunk.
//
// What that memory holds is the matter of two files, of which the macro ACTIVATIONS chooses:
//   void put_x(uint c, uint i, vec4 v)   stores elements 4 i .. 4 i + 3 of a chunk's column c
//   uint tile_unit(uint u)               where a unit begins, in the tile's first column
//   void add_run(uint i, uint u, uint j, uint at, bool valid)
//                                        adds run j of the lane's unit i, which is u of its row and is at `at`
//
// The includer has the specialization constants COLS, ROWS, UNITS, CHUNK (a multiple of 128); the push
// constant k; activations in rows of k as x[] and x4[]; and defines
//   Unit row_unit(uint r, uint u)   loads unit u of weight row r of this subgroup's
//   uint unit_of_row(uint u)        which unit of its row that is

const uint CHUNK_UNITS = CHUNK / 32;

Unit row_unit(uint r, uint u);
uint unit_of_row(uint u);

Unit units[UNITS][ROWS];
float sums[ROWS][COLS];

void clear_sums() {
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            sums[r][c] = 0.0;
        }
    }
}

// Lane's unit i of the batch from `first` on; lanes past the end repeat the last one.
uint batch_unit(uint first, uint i, uint end) {
    return min(first + i * gl_SubgroupSize + gl_SubgroupInvocationID, end - 1);
}

void load_batch(uint first, uint end) {
    [[unroll]] for (uint i = 0; i < UNITS; i++) {
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            units[i][r] = row_unit(r, batch_unit(first, i, end));
        }
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

// Adds the loaded batch. `tile_first`: the unit with which the tile begins.
void add_batch(uint first, uint end, uint tile_first) {
    [[unroll]] for (uint i = 0; i < UNITS; i++) {
        uint u = batch_unit(first, i, end);
        bool valid = first + i * gl_SubgroupSize + gl_SubgroupInvocationID < end;
        uint at = tile_unit(u - tile_first);
        [[unroll]] for (uint j = 0; j < RUNS; j++) {
            add_run(i, u, j, at, valid);
        }
    }
}

// Adds units first..end of all rows, of which the first batch is loaded.
void add_units(uint first, uint end) {
    add_batch(first, end, first);
    for (uint next = first + UNITS * gl_SubgroupSize; next < end; next += UNITS * gl_SubgroupSize) {
        load_batch(next, end);
        add_batch(next, end, first);
    }
}

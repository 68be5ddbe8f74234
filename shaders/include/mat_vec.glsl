// What kernels for few columns share: weights are read once, by whole units, and multiplied with
// activations that the workgroup holds in shared memory. Needs common.glsl and weights.glsl.
//
// A subgroup owns ROWS weight rows; its lanes take units in strides of the subgroup, UNITS at a time, all
// loads of which are issued before the first is used: what counts is how many are on their way. For the
// same reason the first ones are loaded before the activations are staged. Rows longer than CHUNK elements
// go chunk by chunk.
//
// The includer has the specialization constants COLS, ROWS, UNITS, CHUNK (a multiple of 128); the push
// constant k; activations in rows of k as x[] and x4[]; and defines
//   Unit row_unit(uint r, uint u)   loads unit u of weight row r of this subgroup's
//   uint unit_of_row(uint u)        which unit of its row that is

// The tile in shared memory: vec4s of CHUNK elements of each column, after every 8 * RUNS one left out, so
// that lanes with neighbouring units hit different banks.
const uint TILE_RUN = 8 * RUNS;
const uint TILE_COLUMN = CHUNK / 4 + CHUNK / (4 * TILE_RUN);
const uint CHUNK_UNITS = CHUNK / 32;
shared vec4 x_tile[COLS * TILE_COLUMN];

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

// The vec4 of the tile with elements 4 i .. 4 i + 3 of a chunk's column.
uint tile_slot(uint i) { return i + i / TILE_RUN; }

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

// Elements 4 i .. 4 i + 3 of a unit. What float types have past the row's end may be NaN.
vec4 row_q(Unit w, uint u, uint i) {
    vec4 q = unit_q(w, u, i);
    if (QUANT_BLOCK == 1) {
        uint n = unit_of_row(u);
        uint e = n / 4 * 128 + n % 4 * 8 + i / 2 * 32 + i % 2 * 4;
        q = mix(q, vec4(0.0), greaterThanEqual(uvec4(e, e + 1, e + 2, e + 3), uvec4(p.k)));
    }
    return q;
}

// Run j of the lane's unit u, whose first vec4 in the tile is `at`.
void add_run(uint i, uint u, uint j, uint at, bool valid) {
    float part[ROWS][COLS];
    float x_sum[COLS];
    [[unroll]] for (uint s = 0; s < 8 / RUNS; s++) {
        vec4 x[COLS];
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            x[c] = x_tile[c * TILE_COLUMN + at + j * 8 + s];
            float four = (x[c].x + x[c].y) + (x[c].z + x[c].w);
            x_sum[c] = s == 0 ? four : x_sum[c] + four;
        }
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            vec4 q = row_q(units[i][r], u, j * (8 / RUNS) + s);
            [[unroll]] for (uint c = 0; c < COLS; c++) {
                float t = s == 0 ? q.x * x[c].x : part[r][c] + q.x * x[c].x;
                part[r][c] = ((t + q.y * x[c].y) + q.z * x[c].z) + q.w * x[c].w;
            }
        }
    }
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        vec2 scale = unit_scale(units[i][r], u, j);
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            float t = scale.x * part[r][c] + scale.y * x_sum[c];
            sums[r][c] += valid ? t : 0.0;
        }
    }
}

// Adds the loaded batch. `tile_first`: the unit with which the tile begins.
void add_batch(uint first, uint end, uint tile_first) {
    [[unroll]] for (uint i = 0; i < UNITS; i++) {
        uint u = batch_unit(first, i, end);
        bool valid = first + i * gl_SubgroupSize + gl_SubgroupInvocationID < end;
        uint in_tile = u - tile_first;
        uint at = in_tile / RUNS * (TILE_RUN + 1) + in_tile % RUNS * (8 / RUNS);
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

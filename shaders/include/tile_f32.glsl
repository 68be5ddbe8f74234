// The tile of mat_vec.glsl with activations as they are. They are in vec4s, CHUNK elements of each column one
// after the other; after every 8 * RUNS one is left out, so that lanes with neighbouring units hit different
// banks.
const uint TILE_GROUP = 8 * RUNS + 1;
const uint TILE_COLUMN = CHUNK_UNITS / RUNS * TILE_GROUP;
shared vec4 x_tile[COLS * TILE_COLUMN];

void put_x(uint c, uint i, vec4 v) { x_tile[c * TILE_COLUMN + i + i / (8 * RUNS)] = v; }
uint tile_unit(uint u) { return u / RUNS * TILE_GROUP + u % RUNS * (8 / RUNS); }

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

void add_run(uint u, uint j, uint at, bool valid) {
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
            vec4 q = row_q(units[0][r], u, j * (8 / RUNS) + s);
            [[unroll]] for (uint c = 0; c < COLS; c++) {
                float t = s == 0 ? q.x * x[c].x : part[r][c] + q.x * x[c].x;
                part[r][c] = ((t + q.y * x[c].y) + q.z * x[c].z) + q.w * x[c].w;
            }
        }
    }
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        vec2 scale = unit_scale(units[0][r], u, j);
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            float t = scale.x * part[r][c] + scale.y * x_sum[c];
            sums[r][c] += valid ? t : 0.0;
        }
    }
}

// The tile of mat_vec.glsl with activations as integers of 16 bits, for weights that are bytes: a packed dot
// product multiplies four at once, where floats take a conversion and a product each. 32 elements share a scale,
// x = scale * q, |q| <= 32512, to half a scale: finer than f16 would be for all that counts. q is two signed
// bytes, q = 256 * high + low, and their products with weights are added exactly. Values below 2^-100 become 0; 32
// values with an infinity or a NaN get the scale NaN.
//
// A unit is TILE_UNIT vectors: of each run the high bytes of its elements, then the low ones; then the runs'
// scales, then their sums of x. An odd number of vectors, so that lanes with neighbouring units hit different
// banks.
const uint RUN_WORDS = 8 / RUNS;
const uint TILE_UNIT = RUNS == 4 ? 7 : 5;
const uint TILE_COLUMN = CHUNK_UNITS * TILE_UNIT;
const uint FACTORS = 16; // the word of the first scale
shared uvec4 x_tile[COLS * TILE_COLUMN];

uint tile_unit(uint u) { return u * TILE_UNIT; }

// Four signed bytes of numbers, the lowest of each.
uint pack(ivec4 q) {
    q &= 255;
    return uint(q.x | q.y << 8 | q.z << 16 | q.w << 24);
}

// To be called by the eight lanes with the 32 elements of a scale together.
void put_x(uint c, uint i, vec4 v) {
    const uint LEAST = 27 << 23; // 2^-100
    const uint INFINITY = 0x7f800000;
    // Magnitudes order as their bits do, NaN above all.
    uvec4 magnitude = floatBitsToUint(v) & 0x7fffffff;
    uint most = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
    [[unroll]] for (uint lane = 1; lane < 8; lane *= 2) {
        most = max(most, subgroupShuffleXor(most, lane));
    }
    bool some = most > LEAST && most < INFINITY;
    float inverse = some ? 32512.0 / uintBitsToFloat(most) : 0.0;
    float scale = some ? uintBitsToFloat(most) / 32512.0 : most < INFINITY ? 0.0 : uintBitsToFloat(0x7fc00000);
    ivec4 q = ivec4(roundEven(some ? v * inverse : vec4(0.0)));
    int sum = (q.x + q.y) + (q.z + q.w);
    [[unroll]] for (uint lane = 1; lane < RUN_WORDS; lane *= 2) {
        sum += subgroupShuffleXor(sum, lane);
    }
    uint part = i % 8 / RUN_WORDS; // of the RUNS units that share these 32 elements
    uint unit = i / (8 * RUNS) * RUNS + part;
    uint run = i / 8 % RUNS;
    uint at = c * TILE_COLUMN + tile_unit(unit);
    uint word = run * 2 * RUN_WORDS + i % RUN_WORDS;
    x_tile[at + word / 4][word % 4] = pack((q + 128) >> 8);
    word += RUN_WORDS;
    x_tile[at + word / 4][word % 4] = pack(q);
    if (i % RUN_WORDS == 0) {
        word = FACTORS + run;
        x_tile[at + word / 4][word % 4] = floatBitsToUint(scale);
        word += RUNS;
        x_tile[at + word / 4][word % 4] = floatBitsToUint(scale * float(sum));
    }
}

void add_run(uint i, uint u, uint j, uint at, bool valid) {
    uint w[ROWS][RUN_WORDS];
    vec2 w_scale[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint s = 0; s < RUN_WORDS; s++) {
            w[r][s] = unit_word(units[i][r], u, j * RUN_WORDS + s);
        }
        w_scale[r] = unit_scale(units[i][r], u, j);
    }
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        uint column = c * TILE_COLUMN + at;
        uvec4 x[RUN_WORDS / 2];
        [[unroll]] for (uint s = 0; s < RUN_WORDS / 2; s++) {
            x[s] = x_tile[column + j * (RUN_WORDS / 2) + s];
        }
        float x_scale = uintBitsToFloat(x_tile[column + (FACTORS + j) / 4][(FACTORS + j) % 4]);
        float x_sum = uintBitsToFloat(x_tile[column + (FACTORS + RUNS + j) / 4][(FACTORS + RUNS + j) % 4]);
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            int high = 0;
            int low = 0;
            [[unroll]] for (uint s = 0; s < RUN_WORDS; s++) {
                uint l = RUN_WORDS + s;
                high += dotPacked4x8EXT(int(w[r][s]), int(x[s / 4][s % 4]));
                low += dotPacked4x8EXT(int(w[r][s]), int(x[l / 4][l % 4]));
            }
            float t = w_scale[r].x * (x_scale * float(high * 256 + low)) + w_scale[r].y * x_sum;
            sums[r][c] += valid ? t : 0.0;
        }
    }
}

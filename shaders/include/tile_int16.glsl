// The tile of mat_vec.glsl with activations as integers of 16 bits, for weights that are bytes: a packed dot
// product multiplies four at once, where floats take a conversion and a product each. Eight elements share a scale,
// x = scale * q, |q| <= 32512, to half a scale: finer than f16 would be for all that counts. q is two signed
// bytes, q = 256 * high + low, and their products with weights are added exactly. Values below 2^-100 become 0;
// eight values with an infinity or a NaN get the scale NaN.
//
// A unit is TILE_UNIT vectors: one for each eight elements in the order of the unit's, two words of high bytes and
// two of low ones; then their scales, then their sums of x. An odd number of vectors, so that lanes with
// neighbouring units hit different banks.
const uint RUN_WORDS = 8 / RUNS;
const uint RUN_EIGHTS = 4 / RUNS;
const uint SCALES = 4;
const uint SUMS_OF_X = 5;
const uint TILE_UNIT = 7;
const uint TILE_COLUMN = CHUNK_UNITS * TILE_UNIT;
shared uvec4 x_tile[COLS * TILE_COLUMN];

uint tile_unit(uint u) { return u * TILE_UNIT; }

// Four signed bytes of numbers, the lowest of each.
uint pack(uvec4 q) {
    q &= 255;
    return q.x | q.y << 8 | q.z << 16 | q.w << 24;
}

// To be called by the two lanes with the eight elements of a scale together.
void put_x(uint c, uint i, vec4 v) {
    const uint LEAST = 27 << 23; // 2^-100
    const uint INFINITY = 0x7f800000;
    const float TO_INT = 12582912.0; // 1.5 * 2^23: sums with it have integers as their last bits
    // Magnitudes order as their bits do, NaN above all.
    uvec4 magnitude = floatBitsToUint(v) & 0x7fffffff;
    uint most = max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w));
    most = max(most, subgroupShuffleXor(most, 1));
    bool some = most > LEAST && most < INFINITY;
    float top = uintBitsToFloat(some ? most : INFINITY);
    uvec4 rounded = floatBitsToUint(v * (32512.0 / top) + TO_INT);
    uvec4 q = some ? rounded - floatBitsToUint(TO_INT) : uvec4(0);
    float scale = some ? top * (1.0 / 32512.0) : most < INFINITY ? 0.0 : uintBitsToFloat(0x7fc00000);
    int sum = int((q.x + q.y) + (q.z + q.w));
    sum += subgroupShuffleXor(sum, 1);
    uint part = i % 8 / RUN_WORDS; // of the RUNS units that share these 32 elements
    uint unit = i / (8 * RUNS) * RUNS + part;
    uint word = i / 8 % RUNS * RUN_WORDS + i % RUN_WORDS;
    uint at = c * TILE_COLUMN + tile_unit(unit);
    x_tile[at + word / 2][word % 2] = pack((q + 128) >> 8);
    x_tile[at + word / 2][2 + word % 2] = pack(q);
    if (word % 2 == 0) {
        x_tile[at + SCALES][word / 2] = floatBitsToUint(scale);
        x_tile[at + SUMS_OF_X][word / 2] = floatBitsToUint(scale * float(sum));
    }
}

void add_run(uint u, uint j, uint at, bool valid) {
    uint w[ROWS][RUN_WORDS];
    vec2 w_scale[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint s = 0; s < RUN_WORDS; s++) {
            w[r][s] = unit_word(units[0][r], u, j * RUN_WORDS + s);
        }
        w_scale[r] = unit_scale(units[0][r], u, j);
    }
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        uint column = c * TILE_COLUMN + at;
        vec4 scales = uintBitsToFloat(x_tile[column + SCALES]);
        vec4 x_sums = uintBitsToFloat(x_tile[column + SUMS_OF_X]);
        float part[ROWS];
        float x_sum = 0.0;
        [[unroll]] for (uint e = 0; e < RUN_EIGHTS; e++) {
            uint eight = j * RUN_EIGHTS + e;
            ivec4 x = ivec4(x_tile[column + eight]);
            x_sum += x_sums[eight];
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                int w0 = int(w[r][2 * e]);
                int w1 = int(w[r][2 * e + 1]);
                int high = dotPacked4x8EXT(w0, x.x) + dotPacked4x8EXT(w1, x.y);
                int low = dotPacked4x8EXT(w0, x.z) + dotPacked4x8EXT(w1, x.w);
                float t = scales[eight] * float(high * 256 + low);
                part[r] = e == 0 ? t : part[r] + t;
            }
        }
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            float t = w_scale[r].x * part[r] + w_scale[r].y * x_sum;
            sums[r][c] += valid ? t : 0.0;
        }
    }
}

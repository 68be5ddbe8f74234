// F16: IEEE half.
const uint QUANT_BLOCK = 1;
const uint QUANT_BYTES = 2;

void decode8(uint64_t row, uint k, out float w[8]) {
    uvec4 pairs = load16_align2(row + k * 2);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        vec2 two = unpackHalf2x16(pairs[i]);
        w[2 * i] = two.x;
        w[2 * i + 1] = two.y;
    }
}

const uint RUNS = 4;
struct Unit {
    uvec4 q[4];
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    [[unroll]] for (uint j = 0; j < 4; j++) {
        w.q[j] = load_halves8(row, float_run(u, j, k), k);
    }
    return w;
}

vec4 unit_q(Unit w, uint u, uint i) {
    uvec2 two = i % 2 == 0 ? w.q[i / 2].xy : w.q[i / 2].zw;
    return vec4(unpackHalf2x16(two.x), unpackHalf2x16(two.y));
}

vec2 unit_scale(Unit w, uint u, uint j) { return vec2(1.0, 0.0); }

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

#include "unit_halves.glsl"

vec4 unit_q(Unit w, uint u, uint i) {
    uvec2 two = i % 2 == 0 ? w.q[i / 2].xy : w.q[i / 2].zw;
    return vec4(unpackHalf2x16(two.x), unpackHalf2x16(two.y));
}

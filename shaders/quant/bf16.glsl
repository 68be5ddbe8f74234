// BF16: the upper half of an IEEE single.
const uint QUANT_BLOCK = 1;
const uint QUANT_BYTES = 2;

void decode8(uint64_t row, uint k, out float w[8]) {
    uvec4 pairs = load16_align2(row + k * 2);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        w[2 * i] = uintBitsToFloat(pairs[i] << 16);
        w[2 * i + 1] = uintBitsToFloat(pairs[i] & 0xffff0000);
    }
}

#include "unit_halves.glsl"

vec4 unit_q(Unit w, uint u, uint i) {
    uvec2 two = i % 2 == 0 ? w.q[i / 2].xy : w.q[i / 2].zw;
    return uintBitsToFloat(uvec4(two.x << 16, two.x & 0xffff0000, two.y << 16, two.y & 0xffff0000));
}

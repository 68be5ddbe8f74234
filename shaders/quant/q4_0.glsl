// Q4_0: f16 d, u8 qs[16]. Elements 0..15 are the low nibbles, 16..31 the high ones; w = d * (q - 8).
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 18;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 18;
    float d = load_half(block);
    uvec2 q = (load8_align2(block + (2 + (k & 8))) >> ((k & 16) >> 2)) & 0x0f0f0f0f;
    scale8(q, d, -8.0 * d, w);
}

#include "unit_nibbles.glsl"

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) {
    return unit_nibbles(w, i) & 0x0f0f0f0f;
}

vec2 unit_scale(Unit w, uint u, uint j) { return first_half(w.w[0], w.odd) * vec2(1.0, -8.0); }
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 18;
    scale = vec2(load_half(block), 0.0);
    q = minus((load16_align2(block + 2) >> ((k & 16) >> 2)) & 0x0f0f0f0f, 8);
}
#endif

// IQ4_NL: f16 d, u8 qs[16]. Nibbles as in Q4_0; w = d * values[q].
#include "iq4.glsl"
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 18;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 18;
    iq4_scale8(load8_align2(block + (2 + (k & 8))) >> ((k & 16) >> 2), load_half(block), w);
}

#include "unit_nibbles.glsl"

#define UNIT_SIGNED true
uint unit_word(Unit w, uint u, uint i) { return iq4_bytes(unit_nibbles(w, i)); }

vec2 unit_scale(Unit w, uint u, uint j) { return vec2(first_half(w.w[0], w.odd), 0.0); }
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 18;
    scale = vec2(load_half(block), 0.0);
    q = iq4_bytes16(load16_align2(block + 2) >> ((k & 16) >> 2));
}
#endif

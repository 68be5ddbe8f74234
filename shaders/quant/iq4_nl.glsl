// IQ4_NL: f16 d, u8 qs[16]. Nibbles as in Q4_0; w = d * values[q].
#include "iq4.glsl"
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 18;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 18;
    iq4_scale8(load8_align2(block + (2 + (k & 8))) >> ((k & 16) >> 2), load_half(block), w);
}

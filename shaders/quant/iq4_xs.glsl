// IQ4_XS: f16 d, u16 scales_h, u8 scales_l[4], u8 qs[128]. 32 elements use 16 bytes of qs as in Q4_0
// and have a scale of 6 bits: a nibble of scales_l, two bits of scales_h; w = d * (scale - 32) * values[q].
#include "iq4.glsl"
const uint QUANT_BLOCK = 256;
const uint QUANT_BYTES = 136;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 256 * 136;
    uint e = k & 255;
    uint j = e / 32;
    uvec2 head = load8_align8(block);
    uint scale = ((head.y >> (j * 4)) & 15) | (((head.x >> (16 + j * 2)) & 3) << 4);
    float d = unpackHalf2x16(head.x).x * float(int(scale) - 32);
    iq4_scale8(load8_align8(block + (8 + j * 16 + (e & 8))) >> ((e & 16) >> 2), d, w);
}

const uint RUNS = 1;
struct Unit {
    uvec2 head;
    uvec2 q[2];
};

Unit load_unit(uint64_t row, uint u, uint k) {
    uint64_t block = row + u / 8 * 136;
    uint64_t q = block + (8 + u % 8 * 16);
    return Unit(load8_align8(block), uvec2[2](load8_align8(q), load8_align8(q + 8)));
}

#define UNIT_SIGNED true
uint unit_word(Unit w, uint u, uint i) { return iq4_bytes(w.q[i % 4 / 2][i % 2] >> (i / 4 * 4)); }

vec2 unit_scale(Unit w, uint u, uint j) {
    uint b = u % 8;
    uint scale = ((w.head.y >> (b * 4)) & 15) | (((w.head.x >> (16 + b * 2)) & 3) << 4);
    return vec2(unpackHalf2x16(w.head.x).x * float(int(scale) - 32), 0.0);
}
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 256 * 136;
    uint j = (k & 255) / 32;
    uvec2 head = load8_align8(block);
    uint six = ((head.y >> (j * 4)) & 15) | (((head.x >> (16 + j * 2)) & 3) << 4);
    scale = vec2(unpackHalf2x16(head.x).x * float(int(six) - 32), 0.0);
    q = iq4_bytes16(load16_align8(block + (8 + j * 16)) >> ((k & 16) >> 2));
}
#endif

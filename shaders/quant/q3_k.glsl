// Q3_K: u8 hmask[32], u8 qs[64], u8 scales[12], f16 d. Low two bits as in Q2_K; bit j of hmask[l] is
// bit 2 of element 32 j + l. Scales have 6 bits, one for 16 elements: scale i has its low nibble in
// scales[i % 8] (low nibble for i < 8), its upper bits in scales[8 + i % 4] at 2 (i / 4);
// w = d * (scale - 32) * (q - 4).
const uint QUANT_BLOCK = 256;
const uint QUANT_BYTES = 110;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 256 * 110;
    uint e = k & 255;
    uint l = e & 31;
    uint i = e / 16;
    uint low = load_u8(block + (96 + (i & 7))) >> (i / 8 * 4);
    uint high = load_u8(block + (104 + (i & 3))) >> (i / 4 * 2);
    int scale = int((low & 15) | ((high & 3) << 4)) - 32;
    uvec2 q = (load8_align2(block + (32 + e / 128 * 32 + l)) >> ((e / 32 & 3) * 2)) & 0x03030303;
    uvec2 bit2 = (load8_align2(block + l) >> (e / 32)) & 0x01010101;
    float d = load_half(block + 108) * float(scale);
    scale8(q | (bit2 << 2), d, -4.0 * d, w);
}

const uint RUNS = 4;
struct Unit {
    uvec3 q;
    uvec3 high;
    uvec4 scales; // and d
    bool odd;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    uint64_t block = row + u / 8 * 110;
    uint64_t even = block & ~uint64_t(3);
    uint l = u % 4 * 8;
    U32s scales = U32s((block + 96) & ~uint64_t(3));
    return Unit(load12(even + (32 + u / 4 % 2 * 32 + l)), load12(even + l),
        uvec4(scales.u[0], scales.u[1], scales.u[2], scales.u[3]), (uint(block) & 2) != 0);
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) {
    uint q = halves_from(w.q[i % 2], w.q[i % 2 + 1], w.odd) >> (i / 2 * 2);
    uint high = halves_from(w.high[i % 2], w.high[i % 2 + 1], w.odd) >> (u / 4 % 2 * 4 + i / 2);
    return (q & 0x03030303) | ((high & 0x01010101) << 2);
}

vec2 unit_scale(Unit w, uint u, uint j) {
    uint upper = u / 4 % 2;
    uint at = j % 2 * 16 + u % 4 / 2 * 8;
    uint low = halves_from(w.scales[j / 2], w.scales[j / 2 + 1], w.odd) >> (at + upper * 4);
    uint high = halves_from(w.scales.z, w.scales.w, w.odd) >> (at + upper * 4 + j / 2 * 2);
    int scale = int((low & 15) | ((high & 3) << 4)) - 32;
    float d = unpackHalf2x16(w.odd ? w.scales.w >> 16 : w.scales.w).x * float(scale);
    return vec2(d, -4.0 * d);
}
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 16;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 256 * 110;
    uint e = k & 255;
    uint i = e / 16;
    uint low = load_u8(block + (96 + (i & 7))) >> (i / 8 * 4);
    uint high = load_u8(block + (104 + (i & 3))) >> (i / 4 * 2);
    int both = int((low & 15) | ((high & 3) << 4)) - 32;
    scale = vec2(load_half(block + 108) * float(both), 0.0);
    uvec4 two = (load16_align2(block + (32 + e / 128 * 32 + (e & 31))) >> ((e / 32 & 3) * 2)) & 0x03030303;
    uvec4 bit2 = (load16_align2(block + (e & 31)) >> (e / 32)) & 0x01010101;
    q = minus(two | (bit2 << 2), 4);
}
#endif

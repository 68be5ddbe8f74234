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

// Q4_1: f16 d, f16 m, u8 qs[16]. Elements 0..15 are the low nibbles, 16..31 the high ones; w = d * q + m.
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 20;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 20;
    vec2 dm = load_half2(block);
    uvec2 q = (load8_align4(block + (4 + (k & 8))) >> ((k & 16) >> 2)) & 0x0f0f0f0f;
    scale8(q, dm.x, dm.y, w);
}

#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = true;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 20;
    scale = load_half2(block);
    q = (load16_align4(block + 4) >> ((k & 16) >> 2)) & 0x0f0f0f0f;
}
#endif

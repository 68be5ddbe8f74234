// Q6_K: u8 ql[128], u8 qh[64], i8 scales[16], f16 d. 128 elements use 64 bytes of ql (low nibbles
// are elements 0..63, high ones 64..127) and 32 bytes of qh (two bits for each 32 elements); a scale
// for 16 elements; w = d * scale * (q - 32).
const uint QUANT_BLOCK = 256;
const uint QUANT_BYTES = 210;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 256 * 210;
    uint e = k & 255;
    float d = load_half(block + 208) * float(load_i8(block + (192 + e / 16)));
    uvec2 low = load8_align2(block + (e / 128 * 64 + (e & 63))) >> ((e & 64) >> 4);
    uvec2 high = load8_align2(block + (128 + e / 128 * 32 + (e & 31))) >> ((e / 32 & 3) * 2);
    scale8((low & 0x0f0f0f0f) | ((high & 0x03030303) << 4), d, -32.0 * d, w);
}

const uint RUNS = 4;
struct Unit {
    uvec3 low[2];
    uvec3 high;
    uvec3 scales;
    uint d;
    bool odd;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    uint64_t block = row + u / 8 * 210;
    uint64_t even = block & ~uint64_t(3);
    uint upper = u / 4 % 2;
    uint l = u % 4 * 8;
    uint64_t low = even + (upper * 64 + l);
    return Unit(uvec3[2](load12(low), load12(low + 32)), load12(even + (128 + upper * 32 + l)),
        load12(even + (192 + upper * 8)), uint(U16s(block + 208).u[0]), (uint(block) & 2) != 0);
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) {
    uvec3 low = w.low[i / 2 % 2];
    uint q = halves_from(low[i % 2], low[i % 2 + 1], w.odd) >> (i / 4 * 4);
    uint high = halves_from(w.high[i % 2], w.high[i % 2 + 1], w.odd) >> (i / 2 * 2);
    return (q & 0x0f0f0f0f) | ((high & 0x03030303) << 4);
}

vec2 unit_scale(Unit w, uint u, uint j) {
    uint four = halves_from(w.scales[j / 2], w.scales[j / 2 + 1], w.odd);
    int scale = int(four << (24 - (j % 2 * 16 + u % 4 / 2 * 8))) >> 24;
    float d = unpackHalf2x16(w.d).x * float(scale);
    return vec2(d, -32.0 * d);
}
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 16;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 256 * 210;
    uint e = k & 255;
    scale = vec2(load_half(block + 208) * float(load_i8(block + (192 + e / 16))), 0.0);
    uvec4 low = load16_align2(block + (e / 128 * 64 + (e & 63))) >> ((e & 64) >> 4);
    uvec4 high = load16_align2(block + (128 + e / 128 * 32 + (e & 31))) >> ((e / 32 & 3) * 2);
    q = minus((low & 0x0f0f0f0f) | ((high & 0x03030303) << 4), 32);
}
#endif

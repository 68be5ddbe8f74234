// Q4_1: f16 d, f16 m, u8 qs[16]. Elements 0..15 are the low nibbles, 16..31 the high ones; w = d * q + m.
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 20;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 20;
    vec2 dm = load_half2(block);
    uvec2 q = (load8_align4(block + (4 + (k & 8))) >> ((k & 16) >> 2)) & 0x0f0f0f0f;
    scale8(q, dm.x, dm.y, w);
}

const uint RUNS = 1;
struct Unit {
    uint w[5];
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    LOAD_WORDS(w.w, 5, row + u * 20)
    return w;
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) { return (w.w[1 + i % 4] >> (i / 4 * 4)) & 0x0f0f0f0f; }

vec2 unit_scale(Unit w, uint u, uint j) { return unpackHalf2x16(w.w[0]); }
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = true;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 20;
    scale = load_half2(block);
    q = (load16_align4(block + 4) >> ((k & 16) >> 2)) & 0x0f0f0f0f;
}
#endif

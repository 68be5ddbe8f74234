// Q5_1: f16 d, f16 m, u32 qh, u8 qs[16]. Nibbles as in Q4_1, bit i of qh is bit 4 of element i;
// w = d * q + m.
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 24;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 24;
    uvec2 head = load8_align8(block);
    vec2 dm = unpackHalf2x16(head.x);
    uvec2 high = spread_bits(head.y >> (k & 31));
    uvec2 q = (load8_align8(block + (8 + (k & 8))) >> ((k & 16) >> 2)) & 0x0f0f0f0f;
    scale8(q | (high << 4), dm.x, dm.y, w);
}

const uint RUNS = 1;
struct Unit {
    uvec2 w[3];
};

Unit load_unit(uint64_t row, uint u, uint k) {
    uint64_t block = row + u * 24;
    return Unit(uvec2[3](load8_align8(block), load8_align8(block + 8), load8_align8(block + 16)));
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) {
    uint high = spread_bits(w.w[0].y >> (i * 4)).x;
    return ((w.w[1 + i % 4 / 2][i % 2] >> (i / 4 * 4)) & 0x0f0f0f0f) | (high << 4);
}

vec2 unit_scale(Unit w, uint u, uint j) { return unpackHalf2x16(w.w[0].x); }
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = true;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 24;
    uvec2 head = load8_align8(block);
    scale = unpackHalf2x16(head.x);
    uint bits = head.y >> (k & 16);
    uvec4 high = uvec4(spread_bits(bits), spread_bits(bits >> 8));
    q = ((load16_align8(block + 8) >> ((k & 16) >> 2)) & 0x0f0f0f0f) | (high << 4);
}
#endif

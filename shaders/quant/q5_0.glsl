// Q5_0: f16 d, u32 qh, u8 qs[16]. Nibbles as in Q4_0, bit i of qh is bit 4 of element i;
// w = d * (q - 16).
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 22;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 22;
    float d = load_half(block);
    uvec2 high = spread_bits(load_u8(block + (2 + (k & 31) / 8)));
    uvec2 q = (load8_align2(block + (6 + (k & 8))) >> ((k & 16) >> 2)) & 0x0f0f0f0f;
    scale8(q | (high << 4), d, -16.0 * d, w);
}

const uint RUNS = 1;
struct Unit {
    uint w[6];
    bool odd;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    uint64_t block = row + u * 22;
    w.odd = (uint(block) & 2) != 0;
    LOAD_WORDS(w.w, 6, block)
    return w;
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) {
    uint high = spread_bits(after_half(w.w[0], w.w[1], w.odd) >> (i * 4)).x;
    uint q = after_half(w.w[1 + i % 4], w.w[2 + i % 4], w.odd) >> (i / 4 * 4);
    return (q & 0x0f0f0f0f) | (high << 4);
}

vec2 unit_scale(Unit w, uint u, uint j) { return first_half(w.w[0], w.odd) * vec2(1.0, -16.0); }
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 22;
    scale = vec2(load_half(block), 0.0);
    uint bits = uint(U16s(block + (2 + (k & 16) / 8)).u[0]);
    uvec4 high = uvec4(spread_bits(bits), spread_bits(bits >> 8));
    q = minus(((load16_align2(block + 6) >> ((k & 16) >> 2)) & 0x0f0f0f0f) | (high << 4), 16);
}
#endif

// Q2_K: u8 scales[16], u8 qs[64], f16 d, f16 dmin. 128 elements use 32 bytes of qs: bits 0..1 are
// elements 0..31, bits 2..3 the next 32, and so on. A scale byte serves 16 elements: the low nibble
// scales d, the high one dmin; w = d * lo * q - dmin * hi.
const uint QUANT_BLOCK = 256;
const uint QUANT_BYTES = 84;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 256 * 84;
    uint e = k & 255;
    vec2 dm = load_half2(block + 80);
    uint scale = load_u8(block + e / 16);
    uvec2 q = (load8_align4(block + (16 + e / 128 * 32 + (e & 31))) >> ((e / 32 & 3) * 2)) & 0x03030303;
    scale8(q, dm.x * float(int(scale & 15)), -dm.y * float(int(scale >> 4)), w);
}

const uint RUNS = 4;
struct Unit {
    uvec2 q;
    uvec2 scales;
    uint dm;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    uint64_t block = row + u / 8 * 84;
    uint upper = u / 4 % 2;
    return Unit(load8_align4(block + (16 + upper * 32 + u % 4 * 8)), load8_align4(block + upper * 8),
        U32s(block + 80).u[0]);
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) { return (w.q[i % 2] >> (i / 2 * 2)) & 0x03030303; }

vec2 unit_scale(Unit w, uint u, uint j) {
    uint scale = w.scales[j / 2] >> (j % 2 * 16 + u % 4 / 2 * 8);
    return unpackHalf2x16(w.dm) * vec2(float(int(scale & 15)), -float(int((scale >> 4) & 15)));
}
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 16;
const bool QUANT_HAS_MIN = true;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 256 * 84;
    uint e = k & 255;
    uint both = load_u8(block + e / 16);
    scale = load_half2(block + 80) * vec2(int(both & 15), -int(both >> 4));
    q = (load16_align4(block + (16 + e / 128 * 32 + (e & 31))) >> ((e / 32 & 3) * 2)) & 0x03030303;
}
#endif

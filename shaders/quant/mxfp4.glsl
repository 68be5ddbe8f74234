// MXFP4: u8 e, u8 qs[16]. Nibbles as in Q4_0: e2m1, sign on top; here its values are doubled
// (0 1 2 3 4 6 8 12), hence w = 2^(e - 128) * value.
const uint QUANT_BLOCK = 32;
const uint QUANT_BYTES = 17;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 32 * 17;
    uint e = load_u8(block);
    // The two smallest are subnormal.
    float d = uintBitsToFloat(e < 2 ? 0x00200000 << e : (e - 1) << 23);
    uvec2 q = load8_align1(block + (1 + (k & 8))) >> ((k & 16) >> 2);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        uint n = q[i / 4] >> (i % 4 * 8);
        uint four = (n & 4) == 0 ? 0x03020100 : 0x0c080604;
        float magnitude = d * byte_at(four, n & 3);
        w[i] = (n & 8) == 0 ? magnitude : -magnitude;
    }
}

const uint RUNS = 1;
struct Unit {
    uint w[5];
    uint e;
    uint shift;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    Unit w;
    uint64_t block = row + u * 17;
    w.e = load_u8(block);
    w.shift = (uint(block + 1) & 3) * 8;
    LOAD_WORDS(w.w, 5, block + 1)
    return w;
}

// The values of four nibbles, each in the low half of a byte, as signed bytes.
uint mxfp4_bytes(uint q) {
    uint bytes = 0;
    [[unroll]] for (uint shift = 0; shift < 32; shift += 8) {
        uint n = q >> shift;
        uint four = (n & 4) == 0 ? 0x03020100 : 0x0c080604;
        uint magnitude = (four >> ((n & 3) * 8)) & 15;
        bytes |= (((n & 8) == 0 ? magnitude : 256 - magnitude) & 255) << shift;
    }
    return bytes;
}

#define UNIT_SIGNED true
uint unit_word(Unit w, uint u, uint i) {
    return mxfp4_bytes(((w.w[i % 4] >> w.shift) | ((w.w[i % 4 + 1] << 1) << (31 - w.shift))) >> (i / 4 * 4));
}

vec2 unit_scale(Unit w, uint u, uint j) {
    return vec2(uintBitsToFloat(w.e < 2 ? 0x00200000 << w.e : (w.e - 1) << 23), 0.0);
}
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = false;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 32 * 17;
    uint e = load_u8(block);
    scale = vec2(uintBitsToFloat(e < 2 ? 0x00200000 << e : (e - 1) << 23), 0.0);
    uvec4 n = uvec4(load8_align1(block + 1), load8_align1(block + 9)) >> ((k & 16) >> 2);
    q = uvec4(mxfp4_bytes(n.x), mxfp4_bytes(n.y), mxfp4_bytes(n.z), mxfp4_bytes(n.w));
}
#endif

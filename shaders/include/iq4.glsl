// The 16 values of IQ4_NL and IQ4_XS:
//   -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
// as bytes of four words, picked by selection: an indexed array would live in memory.
// The word with the value of a nibble, which is its byte n & 3.
uint iq4_word(uint n) {
    const uvec4 VALUES = uvec4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535);
    uvec2 half8 = (n & 8) == 0 ? VALUES.xy : VALUES.zw;
    return (n & 4) == 0 ? half8.x : half8.y;
}

float iq4_value(uint n) { return float(int(iq4_word(n) << (24 - (n & 3) * 8)) >> 24); }

void iq4_scale8(uvec2 q, float d, out float w[8]) {
    [[unroll]] for (uint i = 0; i < 8; i++) {
        w[i] = d * iq4_value(q[i / 4] >> (i % 4 * 8));
    }
}

// The values of four nibbles, each in the low half of a byte, as signed bytes.
uint iq4_bytes(uint q) {
    uint bytes = 0;
    [[unroll]] for (uint shift = 0; shift < 32; shift += 8) {
        uint n = q >> shift;
        bytes |= ((iq4_word(n) >> ((n & 3) * 8)) & 255) << shift;
    }
    return bytes;
}
uvec4 iq4_bytes16(uvec4 q) { return uvec4(iq4_bytes(q.x), iq4_bytes(q.y), iq4_bytes(q.z), iq4_bytes(q.w)); }

// The 16 values of IQ4_NL and IQ4_XS:
//   -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
// as bytes of four words, picked by selection: an indexed array would live in memory.
float iq4_value(uint n) {
    const uvec4 VALUES = uvec4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535);
    uvec2 half8 = (n & 8) == 0 ? VALUES.xy : VALUES.zw;
    uint four = (n & 4) == 0 ? half8.x : half8.y;
    return float(int(four << (24 - (n & 3) * 8)) >> 24);
}

void iq4_scale8(uvec2 q, float d, out float w[8]) {
    [[unroll]] for (uint i = 0; i < 8; i++) {
        w[i] = d * iq4_value(q[i / 4] >> (i % 4 * 8));
    }
}

// The values of the low halves of four bytes.
vec4 iq4_values(uint q) {
    return vec4(iq4_value(q), iq4_value(q >> 8), iq4_value(q >> 16), iq4_value(q >> 24));
}
#ifdef QUANT_AS_BYTES
// 16 nibbles, each in the low half of a byte, as signed bytes.
uvec4 iq4_bytes(uvec4 q) {
    const uvec4 VALUES = uvec4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535);
    uvec4 bytes = uvec4(0);
    [[unroll]] for (uint shift = 0; shift < 32; shift += 8) {
        uvec4 n = q >> shift;
        bvec4 odd = notEqual(n & 4, uvec4(0));
        uvec4 low = mix(uvec4(VALUES.x), uvec4(VALUES.y), odd);
        uvec4 high = mix(uvec4(VALUES.z), uvec4(VALUES.w), odd);
        uvec4 four = mix(low, high, notEqual(n & 8, uvec4(0)));
        bytes |= ((four >> ((n & 3) * 8)) & 255) << shift;
    }
    return bytes;
}
#endif

// Scale and minimum of 32 elements of a Q4_K or Q5_K block, multiplied by d and dmin. The block's head
// is f16 d, f16 dmin, u8 scales[12]: 8 scales and 8 minima of 6 bits. Those of j < 4 are the low 6 bits
// of bytes j and 4 + j. For j >= 4 byte 4 + j holds the low nibbles, the upper bits are the top bits of
// bytes j - 4 and j.
vec2 scale_min_k4(uvec4 head, uint j) {
    uvec3 s = head.yzw >> ((j & 3) * 8);
    uvec2 first = s.xy & 63;
    uvec2 second = (uvec2(s.z, s.z >> 4) & 15) | ((s.xy >> 2) & 48);
    ivec2 both = ivec2(mix(second, first, bvec2(j < 4)));
    return unpackHalf2x16(head.x) * vec2(both);
}

// The same for element runs 2 g and 2 g + 1, of which `j` is 0 or 1: scale, and the minimum negated. Both
// pairs are taken out of the head together, so that asking for one after the other costs little.
vec2 unit_scale_k4(uvec4 head, uint g, uint j) {
    uvec3 s = head.yzw >> (g % 2 * 16);
    uvec2 first = s.xy & 0x3f3f;
    uvec2 second = (uvec2(s.z, s.z >> 4) & 0x0f0f) | ((s.xy >> 2) & 0x3030);
    uvec2 both = g < 2 ? first : second;
    vec2 d = unpackHalf2x16(head.x);
    return vec2(d.x * byte_at(both.x, j), -d.y * byte_at(both.y, j));
}

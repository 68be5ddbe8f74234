// Q4_K: f16 d, f16 dmin, u8 scales[12], u8 qs[128]. 64 elements use 32 bytes of qs: low nibbles, then
// high nibbles; a scale and a minimum for 32 elements; w = d * scale * q - dmin * min.
#include "scale_min_k4.glsl"
const uint QUANT_BLOCK = 256;
const uint QUANT_BYTES = 144;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 256 * 144;
    uint e = k & 255;
    vec2 dm = scale_min_k4(U32x4(block).u, e / 32);
    uvec2 q = (load8_align8(block + (16 + e / 64 * 32 + (e & 31))) >> ((e & 32) >> 3)) & 0x0f0f0f0f;
    scale8(q, dm.x, -dm.y, w);
}

#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = true;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 256 * 144;
    uint e = k & 255;
    scale = scale_min_k4(U32x4(block).u, e / 32) * vec2(1.0, -1.0);
    q = (U32x4(block + (16 + e / 64 * 32 + (e & 31))).u >> ((e & 32) >> 3)) & 0x0f0f0f0f;
}
#endif

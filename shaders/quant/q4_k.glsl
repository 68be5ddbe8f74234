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

const uint RUNS = 2;
struct Unit {
    uvec4 head;
    uvec4 q;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    uint64_t block = row + u / 8 * 144;
    return Unit(U32x4(block).u, U32x4(block + (16 + u % 8 * 16)).u);
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) { return (w.q[i % 4] >> (i / 4 * 4)) & 0x0f0f0f0f; }

vec2 unit_scale(Unit w, uint u, uint j) { return unit_scale_k4(w.head, u / 2 % 4, j); }
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

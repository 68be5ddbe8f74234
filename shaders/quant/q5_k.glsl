// Q5_K: f16 d, f16 dmin, u8 scales[12], u8 qh[32], u8 qs[128]. As Q4_K; bit j of qh[l] is bit 4 of
// element 32 j + l.
#include "scale_min_k4.glsl"
const uint QUANT_BLOCK = 256;
const uint QUANT_BYTES = 176;

void decode8(uint64_t row, uint k, out float w[8]) {
    uint64_t block = row + k / 256 * 176;
    uint e = k & 255;
    uint l = e & 31;
    vec2 dm = scale_min_k4(U32x4(block).u, e / 32);
    uvec2 high = (load8_align8(block + (16 + l)) >> (e / 32)) & 0x01010101;
    uvec2 q = (load8_align8(block + (48 + e / 64 * 32 + l)) >> ((e & 32) >> 3)) & 0x0f0f0f0f;
    scale8(q | (high << 4), dm.x, -dm.y, w);
}

const uint RUNS = 2;
struct Unit {
    uvec4 head;
    uvec4 high;
    uvec4 q;
};

Unit load_unit(uint64_t row, uint u, uint k) {
    uint64_t block = row + u / 8 * 176;
    return Unit(U32x4(block).u, U32x4(block + (16 + u % 2 * 16)).u, U32x4(block + (48 + u % 8 * 16)).u);
}

#define UNIT_SIGNED false
uint unit_word(Unit w, uint u, uint i) {
    uint high = (w.high[i % 4] >> (u / 2 % 4 * 2 + i / 4)) & 0x01010101;
    return ((w.q[i % 4] >> (i / 4 * 4)) & 0x0f0f0f0f) | (high << 4);
}

vec2 unit_scale(Unit w, uint u, uint j) { return unit_scale_k4(w.head, u / 2 % 4, j); }
#ifdef QUANT_AS_BYTES
const uint QUANT_GROUP = 32;
const bool QUANT_HAS_MIN = true;

void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale) {
    uint64_t block = row + k / 256 * 176;
    uint e = k & 255;
    scale = scale_min_k4(U32x4(block).u, e / 32) * vec2(1.0, -1.0);
    uvec4 high = (U32x4(block + (16 + (e & 31))).u >> (e / 32)) & 0x01010101;
    uvec4 low = (U32x4(block + (48 + e / 64 * 32 + (e & 31))).u >> ((e & 32) >> 3)) & 0x0f0f0f0f;
    q = low | (high << 4);
}
#endif

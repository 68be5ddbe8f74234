// Weights of the permutation's type. `#include "quant.glsl"` means quant/<type>.glsl, which defines
//   const uint QUANT_BLOCK   elements of a block (1 for float types)
//   const uint QUANT_BYTES   bytes of a block
//   void decode8(uint64_t row, uint k, out float w[8])
//                            elements k..k+7, k a multiple of 8, of the row that starts at address `row`
// and, for products with few columns, units: 32 elements that one lane takes at once, so that it has few
// and wide loads, and scales are worked out once for many elements.
//   const uint RUNS          runs of a unit. Unit u has RUNS runs of 32 / RUNS elements, 32 elements apart:
//                            run j starts at u / RUNS * 32 * RUNS + u % RUNS * (32 / RUNS) + 32 * j
//   struct Unit              its bytes
//   Unit load_unit(uint64_t row, uint u, uint k)
//                            loads and does nothing else, so that several units can be on their way
//   vec4 unit_q(Unit w, uint u, uint i)
//                            elements 4 i .. 4 i + 3 of the unit, run after run, without scale: float types. All
//                            others have them as bytes, and say by the macro UNIT_SIGNED whether these have a sign
//   uint unit_word(Unit w, uint u, uint i)
//   vec2 unit_scale(Unit w, uint u, uint j)
//                            of run j: w = x * q + y
// and, if QUANT_AS_BYTES is defined, all but float types
//   void decode_bytes16(uint64_t row, uint k, out uvec4 q, out vec2 scale)
//                            elements k..k+15, k a multiple of 16: signed bytes q; w = scale.x * q + scale.y
//   const uint QUANT_GROUP   elements that share `scale`: 16 or 32
//   const bool QUANT_HAS_MIN scale.y is not always 0
// Blocks are those of ggml. Row starts are aligned as blocks are, at most to 16. A decoder may read up
// to 64 bytes past the row: weight buffers are padded by that. Float types have rows of any length,
// there the caller discards the elements past the row's end by selection, for they may be NaN.
//
// Loads are few, aligned and up to 16 bytes wide: lavapipe runs each as a loop over the lanes, and
// hardware fetches whole sectors anyway. Blocks of odd sizes are read as aligned words and shifted.

layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer U32x4 { uvec4 u; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer F32x4 { vec4 f; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer U32x2 { uvec2 u; };

uint load_u8(uint64_t a) { return uint(U8s(a).u[0]); }
int load_i8(uint64_t a) { return bitfieldExtract(int(load_u8(a)), 0, 8); }
float load_half(uint64_t a) { return unpackHalf2x16(uint(U16s(a).u[0])).x; }
vec2 load_half2(uint64_t a) { return unpackHalf2x16(U32s(a).u[0]); }

// 8 bytes, by the alignment of their address.
uvec2 load8_align8(uint64_t a) { return U32x2(a).u; }
uvec2 load8_align4(uint64_t a) { return uvec2(U32s(a).u[0], U32s(a).u[1]); }
uvec2 load8_align1(uint64_t a) {
    U32s s = U32s(a & ~uint64_t(3));
    uvec3 v = uvec3(s.u[0], s.u[1], s.u[2]);
    uint shift = (uint(a) & 3) * 8;
    return (v.xy >> shift) | ((v.yz << 1) << (31 - shift));
}
uvec2 load8_align2(uint64_t a) {
    U32s s = U32s(a & ~uint64_t(3));
    uvec3 v = uvec3(s.u[0], s.u[1], s.u[2]);
    bool odd = (uint(a) & 2) != 0;
    return mix(v.xy, (v.xy >> 16) | (v.yz << 16), bvec2(odd));
}
// 8 half words.
uvec4 load16_align2(uint64_t a) {
    U32s s = U32s(a & ~uint64_t(3));
    uvec4 v = uvec4(s.u[0], s.u[1], s.u[2], s.u[3]);
    uvec4 next = uvec4(v.yzw, s.u[4]);
    bool odd = (uint(a) & 2) != 0;
    return mix(v, (v >> 16) | (next << 16), bvec4(odd));
}

// Bytes as numbers. By way of int: unsigned to float is a slow conversion on CPUs.
float byte_at(uint v, uint i) { return float(int((v >> (8 * i)) & 0xff)); }
float signed_byte_at(uint v, uint i) { return float(int(v << (24 - 8 * i)) >> 24); }

// w = scale * byte + offset
void scale8(uvec2 bytes, float scale, float offset, out float w[8]) {
    [[unroll]] for (uint i = 0; i < 4; i++) {
        w[i] = scale * byte_at(bytes.x, i) + offset;
        w[i + 4] = scale * byte_at(bytes.y, i) + offset;
    }
}

// Bit i of `bits` as bit 0 of byte i.
uvec2 spread_bits(uint bits) {
    return ((uvec2(bits, bits >> 4) & 0xf) * 0x00204081) & 0x01010101;
}

vec4 bytes(uint v) { return vec4(byte_at(v, 0), byte_at(v, 1), byte_at(v, 2), byte_at(v, 3)); }
vec4 signed_bytes(uint v) {
    return vec4(signed_byte_at(v, 0), signed_byte_at(v, 1), signed_byte_at(v, 2), signed_byte_at(v, 3));
}

// Blocks at odd half words, read as aligned words from the word on in which they begin. Word m of the
// block, of words m and m + 1 read:
uint halves_from(uint word, uint next, bool odd) { return odd ? (word >> 16) | (next << 16) : word; }
// The same for what follows the block's first half word, and that half word as a number.
uint after_half(uint word, uint next, bool odd) { return odd ? next : (word >> 16) | (next << 16); }
float first_half(uint word, bool odd) { return unpackHalf2x16(odd ? word >> 16 : word).x; }

uvec3 load12(uint64_t a) {
    U32s s = U32s(a);
    return uvec3(s.u[0], s.u[1], s.u[2]);
}
#define LOAD_WORDS(TO, N, ADDRESS)                                                                         \
    U32s words = U32s((ADDRESS) & ~uint64_t(3));                                                           \
    [[unroll]] for (uint n = 0; n < N; n++) {                                                              \
        TO[n] = words.u[n];                                                                                \
    }

// Float types: start of run j of unit u, within the row of k elements, and loads by the row's alignment.
uint float_run(uint u, uint j, uint k) { return min(u / 4 * 128 + u % 4 * 8 + 32 * j, (k - 1) & ~7u); }
uvec4 load_halves8(uint64_t row, uint i, uint k) {
    uint64_t a = row + i * 2;
    return (k & 7) == 0 ? U32x4(a).u : load16_align2(a);
}
vec4 load_floats4(uint64_t row, uint i, uint k) {
    uint64_t a = row + i * 4;
    return (k & 3) == 0 ? F32x4(a).f : vec4(F32s(a).f[0], F32s(a).f[1], F32s(a).f[2], F32s(a).f[3]);
}
#ifdef QUANT_AS_BYTES
uvec4 load16_align8(uint64_t a) { return uvec4(load8_align8(a), load8_align8(a + 8)); }
uvec4 load16_align4(uint64_t a) { return uvec4(load8_align4(a), load8_align4(a + 8)); }
// Each byte, below 128, minus `by`, as signed bytes.
uvec4 minus(uvec4 bytes, uint by) { return (bytes + (128 - by) * 0x01010101) ^ 0x80808080; }
#endif

#include "quant.glsl"

#ifdef UNIT_SIGNED
vec4 unit_q(Unit w, uint u, uint i) {
    uint word = unit_word(w, u, i);
    return UNIT_SIGNED ? signed_bytes(word) : bytes(word);
}
#endif

uint64_t row_bytes(uint k) { return uint64_t(k / QUANT_BLOCK * QUANT_BYTES); }

// Units of a row of k elements, a multiple of RUNS. Those of float types may reach past its end.
uint row_units(uint k) { return (k + 32 * RUNS - 1) / (32 * RUNS) * RUNS; }

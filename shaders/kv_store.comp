#version 460
#include "common.glsl"
#include "kv.glsl"
// Stores new keys or values into their cells of the cache, converted to the cache's type. The bytes are
// those of ggml's quantize_row_q8_0_ref and quantize_row_q4_0_ref on every device: divisions and
// roundings that GLSL leaves open are done here by hand.
// Bindings: 0 src [n_tokens][n_head][head_dim], 1 cache (see kv.glsl), 2 positions u32[n_tokens]: the
// cell of each token.
// Spec constants: 1 TYPE of the cache.
// Grid: one item per workgroup-size of units; a unit is a block of 32 for q8_0 and q4_0, else one value.
layout(constant_id = 1) const uint TYPE = KV_F16;
layout(push_constant, scalar) uniform Push {
    uint n_head;
    uint head_dim;
    uint n_tokens;
} p;
layout(binding = 0, scalar) readonly buffer Src { float src[]; };
layout(binding = 1, scalar) writeonly buffer CacheF32 { float cache_f32[]; };
layout(binding = 1, scalar) writeonly buffer CacheU16 { uint16_t cache_u16[]; };
layout(binding = 2, scalar) readonly buffer Positions { uint positions[]; };

// The nearest f16, ties to even.
uint half_bits(float v) {
    uint bits = floatBitsToUint(v);
    uint sign = bits >> 16 & 0x8000;
    uint magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        return sign | (magnitude > 0x7f800000u ? 0x7e00 : 0x7c00);
    }
    if (magnitude >= 0x477ff000u) { // rounds to 65536 or more
        return sign | 0x7c00;
    }
    if (magnitude >= 0x38800000u) { // a normal f16
        uint even = magnitude >> 13 & 1;
        return sign | (magnitude - 0x38000000u + 0xfff + even) >> 13;
    }
    uint shift = 126 - (magnitude >> 23); // f16 subnormals count 2^-24
    if (shift > 24) {
        return sign;
    }
    uint mantissa = (magnitude & 0x7fffff) | 0x800000;
    uint even = mantissa >> shift & 1;
    return sign | (mantissa + (1u << (shift - 1)) - 1 + even) >> shift;
}

// a / 127, rounded to nearest: 127 q is an exact difference.
float divided_by_127(float a) {
    precise float q = a / 127.0;
    precise float rest = (a - q * 128.0) + q;
    precise float exact = q + rest * (1.0 / 127.0);
    return exact;
}

// 1 / d, rounded to nearest: the product d q in two exact parts (Dekker).
float reciprocal(float d) {
    precise float q = 1.0 / d;
    precise float d_hi = uintBitsToFloat(floatBitsToUint(d) & 0xfffff000u);
    precise float q_hi = uintBitsToFloat(floatBitsToUint(q) & 0xfffff000u);
    precise float d_lo = d - d_hi;
    precise float q_lo = q - q_hi;
    precise float rest = (((1.0 - d_hi * q_hi) - d_hi * q_lo) - d_lo * q_hi) - d_lo * q_lo;
    precise float exact = q + q * rest;
    return d == 0.0 ? 0.0 : exact;
}

// Nearest integer, halves away from zero.
int round_away(float v) {
    float whole = trunc(v);
    return int(whole) + (abs(v - whole) >= 0.5 ? (v < 0.0 ? -1 : 1) : 0);
}

float value(uint row, uint i) { return i < p.head_dim ? src[row * p.head_dim + i] : 0.0; }

void store_q8_0(uint row, uint first, uint to) {
    float most = 0.0;
    for (uint i = 0; i < KV_BLOCK; ++i) {
        most = max(most, abs(value(row, first + i)));
    }
    float d = divided_by_127(most);
    float inverse = reciprocal(d);
    cache_u16[to] = uint16_t(half_bits(d));
    for (uint i = 0; i < KV_BLOCK; i += 2) {
        precise float a = value(row, first + i) * inverse;
        precise float b = value(row, first + i + 1) * inverse;
        cache_u16[to + 1 + i / 2] = uint16_t((round_away(a) & 0xff) | (round_away(b) & 0xff) << 8);
    }
}

uint int4(float v, float inverse) {
    precise float scaled = v * inverse;
    precise float moved = scaled + 8.5;
    return uint(min(15, int(moved)));
}

void store_q4_0(uint row, uint first, uint to) {
    float most = 0.0; // the value furthest from 0, with its sign
    for (uint i = 0; i < KV_BLOCK; ++i) {
        float v = value(row, first + i);
        most = abs(most) < abs(v) ? v : most;
    }
    float d = most * -0.125;
    float inverse = reciprocal(d);
    cache_u16[to] = uint16_t(half_bits(d));
    for (uint i = 0; i < KV_BLOCK / 2; i += 2) {
        uint word = 0;
        [[unroll]] for (uint j = 0; j < 2; ++j) {
            uint lo = int4(value(row, first + i + j), inverse);
            uint hi = int4(value(row, first + i + j + KV_BLOCK / 2), inverse);
            word |= (lo | hi << 4) << (8 * j);
        }
        cache_u16[to + 1 + i / 2] = uint16_t(word);
    }
}

void main() {
    bool blocks = TYPE == KV_Q8_0 || TYPE == KV_Q4_0;
    uint row_units = blocks ? (p.head_dim + KV_BLOCK - 1) / KV_BLOCK : p.head_dim;
    uint unit = grid_item() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = unit / row_units; // token * n_head + head
    if (row >= p.n_tokens * p.n_head) {
        return;
    }
    uint i = unit - row * row_units;
    uint cell_row = positions[row / p.n_head] * p.n_head + row % p.n_head;
    uint to = cell_row * row_units + i;
    if (TYPE == KV_F32) {
        cache_f32[to] = value(row, i);
    } else if (TYPE == KV_F16) {
        cache_u16[to] = uint16_t(half_bits(value(row, i)));
    } else if (TYPE == KV_Q8_0) {
        store_q8_0(row, i * KV_BLOCK, to * 17);
    } else {
        store_q4_0(row, i * KV_BLOCK, to * 9);
    }
}

#version 460
#include "common.glsl"
#include "reduce.glsl"
// Rows as f16 for matrix units: each row times a power of two that brings its largest magnitude into
// [2^14, 2^15), so that nothing overflows and only what is 2^28 times smaller loses bits. scales[r] undoes
// it. A row with an infinity or a NaN keeps them.
// Bindings: 0 x f32[n_rows][n], 1 out f16[n_rows][n], 2 scales f32[n_rows].
// Grid: one item per row.
layout(push_constant, scalar) uniform Push {
    uint n; // a multiple of 8
    uint n_rows;
} p;
layout(binding = 0, std430) readonly buffer X { vec4 x[]; };
layout(binding = 1, std430) writeonly buffer Out { uvec4 result[]; };
layout(binding = 2, scalar) writeonly buffer Scales { float scales[]; };

const int TOP = 14;

void main() {
    uint row = grid_item();
    if (row >= p.n_rows) {
        return;
    }
    uint n8 = p.n / 8;
    uint most = 0; // magnitudes order as their bits do
    for (uint i = gl_LocalInvocationID.x; i < n8; i += gl_WorkGroupSize.x) {
        uvec4 lo = floatBitsToUint(x[(row * n8 + i) * 2]) & 0x7fffffff;
        uvec4 hi = floatBitsToUint(x[(row * n8 + i) * 2 + 1]) & 0x7fffffff;
        uvec4 top = max(lo, hi);
        most = max(most, max(max(top.x, top.y), max(top.z, top.w)));
    }
    int exponent = int(group_max(most) >> 23) - 127;
    // Zeros, what is too small to matter, and what is not finite stay as they are.
    int shift = exponent > -112 && exponent < 128 ? TOP - exponent : 0;
    float scale = uintBitsToFloat(uint(127 + shift) << 23);
    for (uint i = gl_LocalInvocationID.x; i < n8; i += gl_WorkGroupSize.x) {
        vec4 lo = x[(row * n8 + i) * 2] * scale;
        vec4 hi = x[(row * n8 + i) * 2 + 1] * scale;
        result[row * n8 + i] =
            uvec4(packHalf2x16(lo.xy), packHalf2x16(lo.zw), packHalf2x16(hi.xy), packHalf2x16(hi.zw));
    }
    if (gl_LocalInvocationID.x == 0) {
        scales[row] = uintBitsToFloat(uint(127 - shift) << 23);
    }
}

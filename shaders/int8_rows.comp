#version 460
#include "common.glsl"
// Rows as signed bytes for integer products, 32 values with a scale: x = scale * q, |q| <= 127, to half a
// scale. Values below 2^-100 become 0; 32 values with an infinity or a NaN get the scale NaN.
// Bindings: 0 x f32[n_blocks][32], 1 out i8[n_blocks][32], 2 scales f32[n_blocks].
// Grid: the workgroup takes as many blocks as it has invocations; one item per workgroup.
layout(push_constant, scalar) uniform Push {
    uint n_blocks;
} p;
layout(binding = 0, std430) readonly buffer X { vec4 x[]; };
layout(binding = 1, std430) writeonly buffer Out { uvec4 result[]; };
layout(binding = 2, scalar) writeonly buffer Scales { float scales[]; };

const uint LEAST = 27 << 23; // 2^-100
const uint INFINITY = 0x7f800000;

// Four values as bytes.
uint pack(vec4 v) {
    ivec4 q = clamp(ivec4(roundEven(v)), -127, 127) & 255;
    return uint(q.x | q.y << 8 | q.z << 16 | q.w << 24);
}

void main() {
    uint block = grid_item() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (block >= p.n_blocks) {
        return;
    }
    vec4 v[8];
    uvec4 top = uvec4(0); // magnitudes order as their bits do, NaN above all
    [[unroll]] for (uint i = 0; i < 8; i++) {
        v[i] = x[block * 8 + i];
        top = max(top, floatBitsToUint(v[i]) & 0x7fffffff);
    }
    uint most = max(max(top.x, top.y), max(top.z, top.w));
    bool some = most > LEAST && most < INFINITY;
    float inverse = some ? 127.0 / uintBitsToFloat(most) : 0.0;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        v[i] = some ? v[i] * inverse : vec4(0.0);
    }
    result[block * 2] = uvec4(pack(v[0]), pack(v[1]), pack(v[2]), pack(v[3]));
    result[block * 2 + 1] = uvec4(pack(v[4]), pack(v[5]), pack(v[6]), pack(v[7]));
    float scale = some ? uintBitsToFloat(most) / 127.0 : 0.0;
    scales[block] = most < INFINITY ? scale : uintBitsToFloat(0x7fc00000);
}

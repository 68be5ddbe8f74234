#version 460
#include "common.glsl"
#include "reduce.glsl"
// Reads memory as fast as it can be read: what the speed of other kernels is compared with.
//   y[g] = sum of the words of part g, which has workgroup size * LOADS * 4 words; part g follows part g - 1
// Bindings: 0 y u32[n_parts]. Grid: one item per part.
layout(constant_id = 1) const uint LOADS = 8; // 16-byte loads of an invocation, all in flight at a time
layout(push_constant, scalar) uniform Push {
    uint64_t data;
    uint n_parts;
    uint _pad;
} p;
layout(binding = 0, scalar) writeonly buffer Y { uint y[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Words { uvec4 u; };

void main() {
    uint part = grid_item();
    if (part >= p.n_parts) {
        return;
    }
    uint64_t at = p.data + (uint64_t(part) * gl_WorkGroupSize.x * LOADS + gl_LocalInvocationID.x) * 16;
    uvec4 loaded[LOADS];
    [[unroll]] for (uint i = 0; i < LOADS; i++) {
        loaded[i] = Words(at + i * gl_WorkGroupSize.x * 16).u;
    }
    uvec4 sum = uvec4(0);
    [[unroll]] for (uint i = 0; i < LOADS; i++) {
        sum += loaded[i];
    }
    uint total = group_sum(sum.x + sum.y + sum.z + sum.w);
    if (gl_LocalInvocationID.x == 0) {
        y[part] = total;
    }
}

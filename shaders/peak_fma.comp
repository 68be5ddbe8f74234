#version 460
#include "common.glsl"
// Multiplies and adds f32 as fast as it can be done: what the speed of kernels without matrix units is
// compared with. Independent chains hide the latency of each.
//   y[i] = sum over chains c of v_c, where v_c starts as c and becomes v_c * a + b, `steps` times
// Bindings: 0 y f32[invocations]. Grid: any x.
const uint CHAINS = 8; // of four components each
layout(push_constant, scalar) uniform Push {
    uint steps;
    float a;
    float b;
} p;
layout(binding = 0, scalar) writeonly buffer Y { float y[]; };

void main() {
    vec4 v[CHAINS];
    [[unroll]] for (uint c = 0; c < CHAINS; c++) {
        v[c] = vec4(4 * c) + vec4(0, 1, 2, 3);
    }
    for (uint i = 0; i < p.steps; i++) {
        [[unroll]] for (uint c = 0; c < CHAINS; c++) {
            v[c] = fma(v[c], vec4(p.a), vec4(p.b));
        }
    }
    vec4 sum = vec4(0);
    [[unroll]] for (uint c = 0; c < CHAINS; c++) {
        sum += v[c];
    }
    y[gl_GlobalInvocationID.x] = sum.x + sum.y + sum.z + sum.w;
}

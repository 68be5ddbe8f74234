#version 460
#include "common.glsl"
// The weighted sum of a token's experts: out[t] = sum over its slots s, in order, of weights[t][s] *
// y[t * n_used + s]; with ADD on top of what out holds.
// Bindings: 0 y [n_tokens * n_used][n], 1 weights [n_tokens][n_used], 2 out [n_tokens][n].
// Spec constants: 1 ADD.
// Grid: one item per workgroup-size of the n_tokens * n elements.
layout(constant_id = 1) const bool ADD = false;
layout(push_constant, scalar) uniform Push {
    uint n;
    uint n_tokens;
    uint n_used;
} p;
layout(binding = 0, scalar) readonly buffer Y { float y[]; };
layout(binding = 1, scalar) readonly buffer Weights { float weights[]; };
layout(binding = 2, scalar) buffer Out { float result[]; };

void main() {
    uint item = grid_item() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint token = item / p.n;
    if (token >= p.n_tokens) {
        return;
    }
    uint i = item - token * p.n;
    float sum = ADD ? result[item] : 0.0;
    for (uint slot = token * p.n_used; slot < (token + 1) * p.n_used; ++slot) {
        sum += weights[slot] * y[slot * p.n + i];
    }
    result[item] = sum;
}

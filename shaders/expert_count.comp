#version 460
#include "common.glsl"
#include "reduce.glsl"
// How many pairs (token, slot) chose each expert.
// Bindings: 0 ids u32[n_pairs], 1 counts u32[n_expert].
// Grid: one item per expert.
layout(push_constant, scalar) uniform Push {
    uint n_pairs;
    uint n_expert;
} p;
layout(binding = 0, scalar) readonly buffer Ids { uint ids[]; };
layout(binding = 1, scalar) writeonly buffer Counts { uint counts[]; };

void main() {
    uint expert = grid_item();
    if (expert >= p.n_expert) {
        return;
    }
    uint count = 0;
    for (uint q = gl_LocalInvocationID.x; q < p.n_pairs; q += gl_WorkGroupSize.x) {
        count += uint(ids[q] == expert);
    }
    count = group_sum(count);
    if (gl_LocalInvocationID.x == 0) {
        counts[expert] = count;
    }
}

#version 460
#include "common.glsl"
#include "glu.glsl"
// Gated activation: out[r][c] = act(gate[r][c]) * up[r][c] over n_rows * n values. FUSED 1: gate and up are
// the halves of rows of 2 n values, both bound to the same tensor (of ffn_gate_up_exps).
// OP is that of glu.glsl.
// Bindings: 0 gate [n_rows][n], 1 up [n_rows][n], 2 out [n_rows][n]; out may be gate or up, unless FUSED.
// Grid: one item per workgroup-size of elements.
layout(constant_id = 1) const uint OP = 0;
layout(constant_id = 2) const uint FUSED = 0;
layout(push_constant, scalar) uniform Push {
    uint count; // n_rows * n
    uint n;
    float alpha;
    float limit;
} p;
layout(binding = 0, scalar) readonly buffer Gate { float gate[]; };
layout(binding = 1, scalar) readonly buffer Up { float up[]; };
layout(binding = 2, scalar) writeonly buffer Out { float y[]; };

void main() {
    uint i = grid_item() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (i < p.count) {
        // i counts over rows of n; in rows of 2 n as many values more lie before each row.
        uint at = FUSED != 0 ? i + i / p.n * p.n : i;
        y[i] = glu(OP, gate[at], up[FUSED != 0 ? at + p.n : at], p.alpha, p.limit);
    }
}

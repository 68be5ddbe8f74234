#version 460
#include "common.glsl"
// Gated activation: out[r][c] = act(gate[r][c]) * up[r][c] over n_rows * n values. FUSED 1: gate and up are
// the halves of rows of 2 n values, both bound to the same tensor (of ffn_gate_up_exps).
//   OP 0  swiglu      silu(g) * u
//   OP 1  geglu       gelu_tanh(g) * u
//   OP 2  reglu       max(g, 0) * u
//   OP 3  swiglu_oai  g, u clamped at `limit` (g from above, u both ways): g * sigmoid(alpha g) * (u + 1)
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

float sigmoid(float x) { return 1.0 / (1.0 + exp(-x)); }

float glu(float g, float u) {
    if (OP == 1) {
        // 0.5 (1 + tanh z) = sigmoid(2 z), which loses nothing where tanh is near -1
        return g * sigmoid(2.0 * 0.7978845608 * g * (1.0 + 0.044715 * g * g)) * u;
    }
    if (OP == 2) {
        return max(g, 0.0) * u;
    }
    if (OP == 3) {
        g = min(g, p.limit);
        u = clamp(u, -p.limit, p.limit);
        return g * sigmoid(p.alpha * g) * (u + 1.0);
    }
    return g * sigmoid(g) * u;
}

void main() {
    uint i = grid_item() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (i < p.count) {
        // i counts over rows of n; in rows of 2 n as many values more lie before each row.
        uint at = FUSED != 0 ? i + i / p.n * p.n : i;
        y[i] = glu(gate[at], up[FUSED != 0 ? at + p.n : at]);
    }
}

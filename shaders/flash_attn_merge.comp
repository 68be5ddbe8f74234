#version 460
#include "common.glsl"
// Joins the splits of flash_attn: out = sum(exp(m_s - M) o_s) / (sum(exp(m_s - M) l_s) [+ exp(sink - M)]).
// A split without keys has l = 0 and an m below every score.
// Bindings: 0 partial [n_splits][n_rows][head_v + 2]: o, m, l; 1 out [n_rows][head_v].
// Spec constants: 1 HAS_SINKS.
// Grid: one item per row.
layout(constant_id = 1) const bool HAS_SINKS = false;
layout(push_constant, scalar) uniform Push {
    uint64_t sinks; // f32[n_head]; 0 = none
    uint n_rows; // n_tokens * n_head
    uint n_head;
    uint head_v;
    uint n_splits;
} p;
layout(binding = 0, scalar) readonly buffer Partial { float partial[]; };
layout(binding = 1, scalar) writeonly buffer Out { float result[]; };

void main() {
    uint row = grid_item();
    if (row >= p.n_rows) {
        return;
    }
    uint stride = p.head_v + 2;
    uint m_at = row * stride + p.head_v;
    float top = partial[m_at];
    for (uint s = 1; s < p.n_splits; ++s) {
        top = max(top, partial[s * p.n_rows * stride + m_at]);
    }
    float sum = 0.0;
    if (HAS_SINKS) {
        float sink = F32s(p.sinks).f[row % p.n_head];
        top = max(top, sink);
        sum = exp(sink - top);
    }
    for (uint s = 0; s < p.n_splits; ++s) {
        uint at = s * p.n_rows * stride + m_at;
        sum += partial[at + 1] * exp(partial[at] - top);
    }
    for (uint d = gl_LocalInvocationID.x; d < p.head_v; d += gl_WorkGroupSize.x) {
        float o = 0.0;
        for (uint s = 0; s < p.n_splits; ++s) {
            uint at = s * p.n_rows * stride;
            o += partial[at + row * stride + d] * exp(partial[at + m_at] - top);
        }
        result[row * p.head_v + d] = o / sum;
    }
}

#version 460
#include "common.glsl"
#include "weights.glsl"
// Rows of a weight matrix as f32: out[r][i] = scale * W[ids[r]][i]. An id past the matrix gives zeros.
// Bindings: 0 ids u32[n_rows], 1 out f32[n_rows][n].
// Grid: item = row.
layout(push_constant, scalar) uniform Push {
    uint64_t weights;
    uint n; // elements of a row
    uint n_rows;
    float scale;
    uint n_weight_rows;
} p;
layout(binding = 0, scalar) readonly buffer Ids { uint ids[]; };
layout(binding = 1, scalar) writeonly buffer Out { float y[]; };

void main() {
    uint r = grid_item();
    if (r >= p.n_rows) {
        return;
    }
    uint id = ids[r];
    bool known = id < p.n_weight_rows;
    uint64_t row = p.weights + uint64_t(known ? id : 0) * row_bytes(p.n);
    for (uint k = gl_LocalInvocationID.x * 8; k < p.n; k += gl_WorkGroupSize.x * 8) {
        float w[8];
        decode8(row, k, w);
        [[unroll]] for (uint i = 0; i < 8; i++) {
            if (QUANT_BLOCK > 1 || k + i < p.n) {
                y[r * p.n + k + i] = known ? p.scale * w[i] : 0.0;
            }
        }
    }
}

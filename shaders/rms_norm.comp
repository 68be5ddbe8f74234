#version 460
#include "common.glsl"
#include "reduce.glsl"
// RMS norm of rows: s = x, or x + residual; y = s / sqrt(mean(s^2) + eps) * weight.
// Bindings: 0 x [n_rows][n], 1 y likewise, 2 residual, 3 sum (both only with HAS_RESIDUAL: s is stored).
// y may be x when there is no residual; sum may be x or residual.
// Spec constants: 1 HAS_RESIDUAL; 2 ROWS_PER_GROUP: 1 = the workgroup shares a row (long rows), more =
// each row is one subgroup's (short ones: heads); 3 HAS_WEIGHT.
// Grid: one item per ROWS_PER_GROUP rows.
layout(constant_id = 1) const bool HAS_RESIDUAL = false;
layout(constant_id = 2) const uint ROWS_PER_GROUP = 1;
layout(constant_id = 3) const bool HAS_WEIGHT = false;
layout(push_constant, scalar) uniform Push {
    uint64_t weight; // f32[n]; 0 = none
    uint n;
    uint n_rows;
    float eps;
    uint _pad;
} p;
layout(binding = 0, scalar) readonly buffer X { float x[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };
layout(binding = 2, scalar) readonly buffer Residual { float residual[]; };
layout(binding = 3, scalar) buffer Sum { float sum[]; };

// The squares of this thread's part of a row: elements first, first + step, ...
float square_part(uint row, bool store, uint first, uint step) {
    float squares = 0.0;
    for (uint i = first; i < p.n; i += step) {
        float s = x[row * p.n + i];
        if (HAS_RESIDUAL) {
            s += residual[row * p.n + i];
            if (store) {
                sum[row * p.n + i] = s;
            }
        }
        squares += s * s;
    }
    return squares;
}

void store_part(uint row, bool store, float squares, uint first, uint step) {
    float norm = 1.0 / sqrt(squares / float(p.n) + p.eps);
    F32s weight = F32s(p.weight);
    for (uint i = first; i < p.n; i += step) {
        float s = HAS_RESIDUAL ? sum[row * p.n + i] : x[row * p.n + i];
        s = HAS_WEIGHT ? s * norm * weight.f[i] : s * norm;
        if (store) {
            y[row * p.n + i] = s;
        }
    }
}

void main() {
    if (ROWS_PER_GROUP == 1) {
        uint row = grid_item();
        if (row < p.n_rows) {
            float squares = group_sum(square_part(row, true, gl_LocalInvocationID.x, gl_WorkGroupSize.x));
            store_part(row, true, squares, gl_LocalInvocationID.x, gl_WorkGroupSize.x);
        }
        return;
    }
    // A subgroup past the last row goes through the motions: lavapipe 26.1 runs uniform loads also where
    // no lane is active, and under GPU-assisted validation such a load has no valid address.
    for (uint i = gl_SubgroupID; i < ROWS_PER_GROUP; i += gl_NumSubgroups) {
        uint row = min(grid_item() * ROWS_PER_GROUP + i, p.n_rows - 1);
        bool store = grid_item() * ROWS_PER_GROUP + i < p.n_rows;
        float squares = subgroupAdd(square_part(row, store, gl_SubgroupInvocationID, gl_SubgroupSize));
        store_part(row, store, squares, gl_SubgroupInvocationID, gl_SubgroupSize);
    }
}

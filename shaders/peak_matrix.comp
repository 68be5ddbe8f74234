#version 460
#pragma use_vulkan_memory_model
#include "common.glsl"
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
// Multiplies matrices of f16 into f32 as fast as the matrix units do: what the speed of other kernels is
// compared with. Fragments stay in registers; independent accumulators hide the latency of each.
//   y[s] = steps * sum over i, j of A_i * B_j, an M x N matrix of each subgroup s
// The values are read, for a chip runs faster on constants. Bindings: 0 f16 A[A_TILES][M][K], then
// B[B_TILES][K][N]; 1 y f32[subgroups][M][N]. Grid: any x. The workgroup is of whole subgroups.
const uint A_TILES = 2;
const uint B_TILES = 4;
layout(constant_id = 1) const uint M = 16;
layout(constant_id = 2) const uint N = 16;
layout(constant_id = 3) const uint K = 16;
layout(push_constant, scalar) uniform Push {
    uint steps;
} p;
layout(binding = 0, scalar) readonly buffer X { float16_t x[]; };
layout(binding = 1, scalar) writeonly buffer Y { float y[]; };

void main() {
    coopmat<float16_t, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a[A_TILES];
    coopmat<float16_t, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b[B_TILES];
    coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> sum[A_TILES][B_TILES];
    [[unroll]] for (uint i = 0; i < A_TILES; i++) {
        coopMatLoad(a[i], x, i * M * K, K, gl_CooperativeMatrixLayoutRowMajor);
    }
    [[unroll]] for (uint j = 0; j < B_TILES; j++) {
        coopMatLoad(b[j], x, A_TILES * M * K + j * K * N, N, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint i = 0; i < A_TILES; i++) {
            sum[i][j] = coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>(0.0);
        }
    }
    for (uint step = 0; step < p.steps; step++) {
        [[unroll]] for (uint i = 0; i < A_TILES; i++) {
            [[unroll]] for (uint j = 0; j < B_TILES; j++) {
                sum[i][j] = coopMatMulAdd(a[i], b[j], sum[i][j]);
            }
        }
    }
    coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> total = sum[0][0];
    [[unroll]] for (uint t = 1; t < A_TILES * B_TILES; t++) {
        total += sum[t / B_TILES][t % B_TILES];
    }
    uint subgroup = gl_WorkGroupID.x * gl_NumSubgroups + gl_SubgroupID;
    coopMatStore(total, y, subgroup * M * N, N, gl_CooperativeMatrixLayoutRowMajor);
}

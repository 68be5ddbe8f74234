// What every kernel starts with: extensions, the workgroup size, and the folded grid.
//
// Conventions. Activations are f32, row-major, bound by push descriptors as 0..n. Weights and small
// constant vectors are reached by address (push constants). What may be absent has a specialization
// constant: a load under `if (address != 0)` may be run ahead of the test (lavapipe 26.1 does, and crashes). Specialization constant 0 is
// the workgroup size, the others are listed in each kernel's header. A kernel works for every subgroup
// size and every row length; offsets into weights are 64-bit.
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_control_flow_attributes : enable
#extension GL_EXT_integer_dot_product : enable
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(local_size_x_id = 0) in;

// A list of work items longer than a grid's side (65535) is folded: item = x + y * GRID_FOLD.
// src/exec/grid.rs folds likewise. The last row of the grid is ragged: compare with the count.
const uint GRID_FOLD = 32768;
uint grid_item() { return gl_WorkGroupID.x + gl_WorkGroupID.y * GRID_FOLD; }

layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer F32s { float f[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer U32s { uint u[]; };
layout(buffer_reference, scalar, buffer_reference_align = 2) readonly buffer U16s { uint16_t u[]; };
layout(buffer_reference, scalar, buffer_reference_align = 1) readonly buffer U8s { uint8_t u[]; };
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer U64s { uint64_t u[]; };

#version 460
#include "common.glsl"
#include "kv.glsl"
#include "kv_encode.glsl"
// Stores new keys or values into their cells of the cache, converted to the cache's type.
// Bindings: 0 src [n_tokens][n_head][head_dim], 1 cache (see kv.glsl), 2 positions u32[n_tokens]: the
// cell of each token.
// Spec constants: 1 TYPE of the cache.
// Grid: one item per workgroup-size of units; see kv_encode.glsl.
layout(constant_id = 1) const uint TYPE = KV_F16;
layout(push_constant, scalar) uniform Push {
    uint n_head;
    uint head_dim;
    uint n_tokens;
} p;
layout(binding = 0, scalar) readonly buffer Src { float src[]; };
layout(binding = 1, scalar) writeonly buffer CacheF32 { float cache_f32[]; };
layout(binding = 1, scalar) writeonly buffer CacheU16 { uint16_t cache_u16[]; };
layout(binding = 2, scalar) readonly buffer Positions { uint positions[]; };

float kv_value(uint row, uint i) { return i < p.head_dim ? src[row * p.head_dim + i] : 0.0; }
void kv_keep(uint row, uint i, float v) {}
void kv_put(uint at, uint half_word) { cache_u16[at] = uint16_t(half_word); }
void kv_put_f32(uint at, float v) { cache_f32[at] = v; }

void main() {
    uint row_units = kv_row_units(TYPE, p.head_dim);
    uint unit = grid_item() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = unit / row_units; // token * n_head + head
    if (row >= p.n_tokens * p.n_head) {
        return;
    }
    uint cell_row = positions[row / p.n_head] * p.n_head + row % p.n_head;
    kv_encode(TYPE, p.head_dim, row, unit - row * row_units, cell_row);
}

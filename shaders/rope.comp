#version 460
#include "common.glsl"
#include "trig.glsl"
// Rotary position embedding, in place: each pair (a, b) of a head turns by theta = position * freqs[i],
//   a' = mscale * (a cos theta - b sin theta), b' = mscale * (a sin theta + b cos theta),
// with theta an f32 product, as Hugging Face and llama.cpp have it. Only the n_rot dimensions from
// rot_offset on change.
// Bindings: 0 x [n_tokens][n_head][head_dim], 1 positions u32[n_tokens].
// Spec constants: 1 PAIRING: 0 = adjacent (2i, 2i+1), 1 = halves (i, i + n_rot/2), GPT-NeoX's.
// Grid: one item per workgroup-size of the n_tokens * n_head * n_rot/2 pairs.
layout(constant_id = 1) const uint PAIRING = 0;
layout(push_constant, scalar) uniform Push {
    uint64_t freqs; // f32[n_rot/2], radians per position
    uint n_head;
    uint head_dim;
    uint n_rot;
    uint rot_offset;
    uint n_tokens;
    float mscale;
} p;
layout(binding = 0, scalar) buffer X { float x[]; };
layout(binding = 1, scalar) readonly buffer Positions { uint positions[]; };

void main() {
    uint pairs = p.n_rot / 2;
    uint item = grid_item() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    uint row = item / pairs; // token * n_head + head
    if (row >= p.n_tokens * p.n_head) {
        return;
    }
    uint pair = item - row * pairs;
    precise float theta = float(positions[row / p.n_head]) * F32s(p.freqs).f[pair];
    vec2 cs = cos_sin(theta) * p.mscale;
    uint first = row * p.head_dim + p.rot_offset + (PAIRING == 0 ? 2 * pair : pair);
    uint second = first + (PAIRING == 0 ? 1 : pairs);
    float a = x[first];
    float b = x[second];
    x[first] = a * cs.x - b * cs.y;
    x[second] = a * cs.y + b * cs.x;
}

#version 460
#include "common.glsl"
#include "order_key.glsl"
// Chooses each token's experts from the router's logits: see choose.glsl.
// Bindings: 0 logits [n_tokens][n_expert], 1 ids u32[n_tokens][n_used], 2 weights likewise,
//   3 status u32[1]: 0, or the layer with a NaN + 1.
// Spec constants: 1 GATING, 2 NORM_WEIGHTS, 3 HAS_BIAS.
// Grid: one item per token. The workgroup's first subgroup does it: one is enough.
layout(constant_id = 1) const uint GATING = 0;
layout(constant_id = 2) const bool NORM_WEIGHTS = false;
layout(constant_id = 3) const bool HAS_BIAS = false;
layout(push_constant, scalar) uniform Push {
    uint64_t bias; // f32[n_expert]; 0 = none
    uint n_expert; // <= MAX_EXPERTS
    uint n_used;
    uint n_tokens;
    uint n_group; // 0 or 1 = no groups
    uint n_group_used;
    uint il; // the layer, for status
    float scale;
    float norm_min;
} p;
layout(binding = 0, scalar) readonly buffer Logits { float logits[]; };
layout(binding = 1, scalar) writeonly buffer Ids { uint ids[]; };
layout(binding = 2, scalar) writeonly buffer Weights { float weights[]; };
layout(binding = 3, scalar) buffer Status { uint status[]; };
#include "choose.glsl"

void main() {
    uint token = grid_item();
    if (token < p.n_tokens) {
        choose(token);
    }
}

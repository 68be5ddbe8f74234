#version 460
#include "common.glsl"
#include "reduce.glsl"
// Chooses each token's experts from the router's logits.
//   score  = GATING 0: softmax(logits), 1: sigmoid(logits), 2: logits, softmax over the chosen at the end
//   chosen = the n_used largest score + bias, in descending order, of equals the lower index first
//   weight = scale * score, with NORM divided by max(sum of the chosen scores, norm_min)
// With n_group > 1 only the n_group_used groups with the largest sum of their two best score + bias take
// part. A token with a NaN or +inf logit, or with none but -inf, gets the experts 0..n_used, and the
// first such layer is reported.
// Bindings: 0 logits [n_tokens][n_expert], 1 ids u32[n_tokens][n_used], 2 weights likewise,
//   3 status u32[1]: 0, or the layer with a NaN + 1.
// Spec constants: 1 GATING, 2 NORM, 3 HAS_BIAS.
// Grid: one item per token. The workgroup is best one subgroup: no barrier is needed then.
layout(constant_id = 1) const uint GATING = 0;
layout(constant_id = 2) const bool NORM = false;
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

const uint MAX_EXPERTS = 512;
shared float score[MAX_EXPERTS];  // of all experts
shared float chosen[MAX_EXPERTS]; // scores of the chosen, by slot
shared uint key[MAX_EXPERTS];     // order_key(score + bias); 0 = taken, 1 = its group is out
shared uint group_key[MAX_EXPERTS];

const uint TAKEN = 0;
const uint GROUP_OUT = 1;

// Removes and returns the index of the largest of keys[0..n]. A thread only touches its own elements.
#define TAKE_BEST(NAME, KEYS)                                                                              \
    uint NAME(uint n) {                                                                                    \
        uvec2 best = uvec2(0, 0xffffffffu);                                                                \
        for (uint i = gl_LocalInvocationID.x; i < n; i += gl_WorkGroupSize.x) {                            \
            best = KEYS[i] > best.x ? uvec2(KEYS[i], i) : best;                                            \
        }                                                                                                  \
        uint i = group_best(best).y;                                                                       \
        if (i % gl_WorkGroupSize.x == gl_LocalInvocationID.x) {                                            \
            KEYS[i] = TAKEN;                                                                               \
        }                                                                                                  \
        return i;                                                                                          \
    }
TAKE_BEST(take_expert, key)
TAKE_BEST(take_group, group_key)

float from_key(uint k) { return uintBitsToFloat(k >> 31 == 1 ? k & 0x7fffffffu : ~k); }
uint to_key(uint order) { return max(order, 2); } // clear of TAKEN and GROUP_OUT

// Loads the logits into `score`; are they no basis for a choice: a NaN or +inf among them, or all -inf?
bool load_logits(uint token) {
    uint bad = 0;
    uint finite = 0;
    for (uint i = gl_LocalInvocationID.x; i < p.n_expert; i += gl_WorkGroupSize.x) {
        float logit = logits[token * p.n_expert + i];
        score[i] = logit;
        uint order = order_key(logit);
        bad |= uint(order == 0 || order == order_key(uintBitsToFloat(0x7f800000u)));
        finite |= uint(order > order_key(uintBitsToFloat(0xff800000u)));
    }
    return group_max(bad) == 1 || group_max(finite) == 0;
}

void store_nan(uint token) {
    for (uint slot = gl_LocalInvocationID.x; slot < p.n_used; slot += gl_WorkGroupSize.x) {
        ids[token * p.n_used + slot] = slot;
        weights[token * p.n_used + slot] = 0.0;
    }
    if (gl_LocalInvocationID.x == 0) {
        atomicCompSwap(status[0], 0, p.il + 1);
    }
}

void soften() {
    uint most = 0;
    for (uint i = gl_LocalInvocationID.x; i < p.n_expert; i += gl_WorkGroupSize.x) {
        most = max(most, order_key(score[i]));
    }
    float top = from_key(group_max(most));
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < p.n_expert; i += gl_WorkGroupSize.x) {
        score[i] = exp(score[i] - top);
        sum += score[i];
    }
    sum = group_sum(sum);
    for (uint i = gl_LocalInvocationID.x; i < p.n_expert; i += gl_WorkGroupSize.x) {
        score[i] /= sum;
    }
}

void score_experts() {
    if (GATING == 0) {
        soften();
    }
    for (uint i = gl_LocalInvocationID.x; i < p.n_expert; i += gl_WorkGroupSize.x) {
        if (GATING == 1) {
            score[i] = 1.0 / (1.0 + exp(-score[i]));
        }
        float biased = HAS_BIAS ? score[i] + F32s(p.bias).f[i] : score[i];
        key[i] = to_key(order_key(biased));
    }
}

// Leaves the experts of the best groups in play.
void choose_groups() {
    uint size = p.n_expert / p.n_group;
    barrier();
    for (uint g = gl_LocalInvocationID.x; g < p.n_group; g += gl_WorkGroupSize.x) {
        uint first = 0;
        uint second = 0;
        for (uint i = g * size; i < (g + 1) * size; ++i) {
            second = max(second, min(first, key[i]));
            first = max(first, key[i]);
        }
        float sum = from_key(first) + (second == 0 ? 0.0 : from_key(second));
        group_key[g] = to_key(order_key(sum));
    }
    for (uint n = 0; n < p.n_group_used; ++n) {
        take_group(p.n_group);
    }
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < p.n_expert; i += gl_WorkGroupSize.x) {
        if (i / size >= p.n_group || group_key[i / size] != TAKEN) {
            key[i] = GROUP_OUT;
        }
    }
}

// Turns the chosen scores into weights.
void store_weights(uint token) {
    float top = GATING == 2 ? chosen[0] : 0.0;
    if (GATING == 2 && HAS_BIAS) { // the order is not that of the scores
        for (uint slot = 1; slot < p.n_used; ++slot) {
            top = max(top, chosen[slot]);
        }
    }
    float sum = 0.0;
    for (uint slot = 0; slot < p.n_used; ++slot) {
        sum += GATING == 2 ? exp(chosen[slot] - top) : chosen[slot];
    }
    for (uint slot = gl_LocalInvocationID.x; slot < p.n_used; slot += gl_WorkGroupSize.x) {
        float weight = GATING == 2 ? exp(chosen[slot] - top) / sum : chosen[slot];
        if (NORM && GATING != 2) {
            weight /= max(sum, p.norm_min);
        }
        weights[token * p.n_used + slot] = weight * p.scale;
    }
}

void main() {
    uint token = grid_item();
    if (token >= p.n_tokens) {
        return;
    }
    if (load_logits(token)) {
        store_nan(token);
        return;
    }
    score_experts();
    if (p.n_group > 1) {
        choose_groups();
    }
    for (uint slot = 0; slot < p.n_used; ++slot) {
        uint expert = take_expert(p.n_expert);
        if (expert % gl_WorkGroupSize.x == gl_LocalInvocationID.x) {
            chosen[slot] = score[expert];
            ids[token * p.n_used + slot] = expert;
        }
    }
    barrier();
    store_weights(token);
}

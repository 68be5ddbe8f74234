// The choice of a token's experts from the router's logits, by the first subgroup of a workgroup.
//   score  = GATING 0: softmax(logits), 1: sigmoid(logits), 2: logits, softmax over the chosen at the end
//   chosen = the n_used largest score + bias, in descending order, of equals the lower index first
//   weight = scale * score, with NORM_WEIGHTS divided by max(sum of the chosen scores, norm_min)
// With n_group > 1 only the n_group_used groups with the largest sum of their two best score + bias take
// part. A token with a NaN or +inf logit, or with none but -inf, gets the experts 0..n_used, and the
// first such layer is reported.
//
// The includer has the specialization constants GATING, NORM_WEIGHTS, HAS_BIAS; the push constants bias,
// n_expert (at most MAX_EXPERTS), n_used, n_group, n_group_used, il, scale, norm_min; and the bindings
// logits[], ids[], weights[], status[]. Needs common.glsl and order_key.glsl.
const uint MAX_EXPERTS = 512;
shared float score[MAX_EXPERTS];  // of all experts
shared float chosen[MAX_EXPERTS]; // scores of the chosen, by slot
shared bool no_basis;             // the logits are none
shared uint key[MAX_EXPERTS];     // order_key(score + bias); 0 = taken, 1 = its group is out
shared uint group_key[MAX_EXPERTS];

const uint TAKEN = 0;
const uint GROUP_OUT = 1;

// A lane's best of keys[0..n], of equals the lowest index. A lane only touches its own elements.
#define LANE_BEST(NAME, KEYS)                                                                              \
    uvec2 NAME(uint n) {                                                                                   \
        uvec2 best = uvec2(0, 0xffffffffu);                                                                \
        for (uint i = gl_SubgroupInvocationID; i < n; i += gl_SubgroupSize) {                              \
            best = KEYS[i] > best.x ? uvec2(KEYS[i], i) : best;                                            \
        }                                                                                                  \
        return best;                                                                                       \
    }
LANE_BEST(lane_best_expert, key)
LANE_BEST(lane_best_group, group_key)

// The best of all lanes' bests.
uint best_index(uvec2 lane_best) {
    uint most = subgroupMax(lane_best.x);
    return subgroupMin(lane_best.x == most ? lane_best.y : 0xffffffffu);
}

float from_key(uint k) { return uintBitsToFloat(k >> 31 == 1 ? k & 0x7fffffffu : ~k); }
uint to_key(uint order) { return max(order, 2); } // clear of TAKEN and GROUP_OUT

// Loads the logits into `score`; are they no basis for a choice: a NaN or +inf among them, or all -inf?
bool load_logits(uint token) {
    uint bad = 0;
    uint finite = 0;
    for (uint i = gl_SubgroupInvocationID; i < p.n_expert; i += gl_SubgroupSize) {
        float logit = logits[token * p.n_expert + i];
        score[i] = logit;
        uint order = order_key(logit);
        bad |= uint(order == 0 || order == order_key(uintBitsToFloat(0x7f800000u)));
        finite |= uint(order > order_key(uintBitsToFloat(0xff800000u)));
    }
    return subgroupMax(bad) == 1 || subgroupMax(finite) == 0;
}

void store_nan(uint token) {
    for (uint slot = gl_SubgroupInvocationID; slot < p.n_used; slot += gl_SubgroupSize) {
        ids[token * p.n_used + slot] = slot;
        weights[token * p.n_used + slot] = 0.0;
    }
    if (gl_SubgroupInvocationID == 0) {
        atomicCompSwap(status[0], 0, p.il + 1);
    }
}

void soften() {
    uint most = 0;
    for (uint i = gl_SubgroupInvocationID; i < p.n_expert; i += gl_SubgroupSize) {
        most = max(most, order_key(score[i]));
    }
    float top = from_key(subgroupMax(most));
    float sum = 0.0;
    for (uint i = gl_SubgroupInvocationID; i < p.n_expert; i += gl_SubgroupSize) {
        score[i] = exp(score[i] - top);
        sum += score[i];
    }
    sum = subgroupAdd(sum);
    for (uint i = gl_SubgroupInvocationID; i < p.n_expert; i += gl_SubgroupSize) {
        score[i] /= sum;
    }
}

void score_experts() {
    if (GATING == 0) {
        soften();
    }
    for (uint i = gl_SubgroupInvocationID; i < p.n_expert; i += gl_SubgroupSize) {
        if (GATING == 1) {
            score[i] = 1.0 / (1.0 + exp(-score[i]));
        }
        float biased = HAS_BIAS ? score[i] + F32s(p.bias).f[i] : score[i];
        key[i] = to_key(order_key(biased));
    }
}

// Chooses the groups: theirs are TAKEN.
void choose_groups() {
    uint size = p.n_expert / p.n_group;
    for (uint g = gl_SubgroupInvocationID; g < p.n_group; g += gl_SubgroupSize) {
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
        uint g = best_index(lane_best_group(p.n_group));
        if (g % gl_SubgroupSize == gl_SubgroupInvocationID) {
            group_key[g] = TAKEN;
        }
    }
}

// Leaves only the experts of the chosen groups in play.
void drop_groups() {
    uint size = p.n_expert / p.n_group;
    for (uint i = gl_SubgroupInvocationID; i < p.n_expert; i += gl_SubgroupSize) {
        if (i / size >= p.n_group || group_key[i / size] != TAKEN) {
            key[i] = GROUP_OUT;
        }
    }
}

// Stores the ids of the best, and leaves each lane the scores of its slots.
void choose_experts(uint token) {
    uvec2 lane_best = lane_best_expert(p.n_expert);
    for (uint slot = 0; slot < p.n_used; ++slot) {
        uint expert = best_index(lane_best);
        float s = subgroupShuffle(score[min(lane_best.y, p.n_expert - 1)], expert % gl_SubgroupSize);
        if (slot % gl_SubgroupSize == gl_SubgroupInvocationID) {
            chosen[slot] = s;
            ids[token * p.n_used + slot] = expert;
        }
        if (expert % gl_SubgroupSize == gl_SubgroupInvocationID) {
            key[expert] = TAKEN;
            lane_best = lane_best_expert(p.n_expert);
        }
    }
}

// Turns the chosen scores into weights.
void store_weights(uint token) {
    float top = 0.0;
    if (GATING == 2) {
        uint most = 0;
        for (uint slot = gl_SubgroupInvocationID; slot < p.n_used; slot += gl_SubgroupSize) {
            most = max(most, order_key(chosen[slot]));
        }
        top = from_key(subgroupMax(most));
    }
    float sum = 0.0;
    for (uint slot = gl_SubgroupInvocationID; slot < p.n_used; slot += gl_SubgroupSize) {
        sum += GATING == 2 ? exp(chosen[slot] - top) : chosen[slot];
    }
    sum = subgroupAdd(sum);
    for (uint slot = gl_SubgroupInvocationID; slot < p.n_used; slot += gl_SubgroupSize) {
        float weight = GATING == 2 ? exp(chosen[slot] - top) / sum : chosen[slot];
        if (NORM_WEIGHTS && GATING != 2) {
            weight /= max(sum, p.norm_min);
        }
        weights[token * p.n_used + slot] = weight * p.scale;
    }
}

// Chooses for one token. To be called by the whole workgroup: where lanes look at what others wrote, there is
// a barrier of it (lavapipe 26.1 never comes back from one of the subgroup while other subgroups are elsewhere).
void choose(uint token) {
    bool works = gl_SubgroupID == 0;
    barrier(); // the token before
    if (works) {
        bool bad = load_logits(token);
        if (gl_SubgroupInvocationID == 0) {
            no_basis = bad;
        }
    }
    barrier();
    if (no_basis) {
        if (works) {
            store_nan(token);
        }
        return;
    }
    if (works) {
        score_experts();
    }
    if (p.n_group > 1) {
        barrier();
        if (works) {
            choose_groups();
        }
        barrier();
        if (works) {
            drop_groups();
        }
    }
    if (works) {
        choose_experts(token);
        store_weights(token);
    }
}

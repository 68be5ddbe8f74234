// The choice of a token's experts from the router's logits, by a workgroup; most of it by its first subgroup.
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
shared uvec4 keys[MAX_EXPERTS / 4]; // order_key(score + bias); 0 = no expert, 1 = its group is out
shared uint group_key[MAX_EXPERTS]; // 0 = taken

const uint NO_EXPERT = 0;
const uint TAKEN = 0;
const uint GROUP_OUT = 1;
const uint COUNTED = 16;

uint key_of(uint i) { return keys[i / 4][i % 4]; }

// The group with the largest key, of equals the first.
uint best_group() {
    uvec2 best = uvec2(0, 0xffffffffu);
    for (uint g = gl_SubgroupInvocationID; g < p.n_group; g += gl_SubgroupSize) {
        best = group_key[g] > best.x ? uvec2(group_key[g], g) : best;
    }
    uint most = subgroupMax(best.x);
    return subgroupMin(best.x == most ? best.y : 0xffffffffu);
}

float from_key(uint k) { return uintBitsToFloat(k >> 31 == 1 ? k & 0x7fffffffu : ~k); }
uint to_key(uint order) { return max(order, 2); } // clear of those

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
        keys[i / 4][i % 4] = to_key(order_key(biased));
    }
    uint end = (p.n_expert + COUNTED - 1) / COUNTED * COUNTED;
    for (uint i = p.n_expert + gl_SubgroupInvocationID; i < end; i += gl_SubgroupSize) {
        keys[i / 4][i % 4] = NO_EXPERT;
    }
}

// Chooses the groups: theirs are TAKEN.
void choose_groups() {
    uint size = p.n_expert / p.n_group;
    for (uint g = gl_SubgroupInvocationID; g < p.n_group; g += gl_SubgroupSize) {
        uint first = 0;
        uint second = 0;
        for (uint i = g * size; i < (g + 1) * size; ++i) {
            second = max(second, min(first, key_of(i)));
            first = max(first, key_of(i));
        }
        float sum = from_key(first) + (second == 0 ? 0.0 : from_key(second));
        group_key[g] = to_key(order_key(sum));
    }
    for (uint n = 0; n < p.n_group_used; ++n) {
        uint g = best_group();
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
            keys[i / 4][i % 4] = GROUP_OUT;
        }
    }
}

// Every expert counts those that come before it, which is its slot. By all of the workgroup. COUNTED at a time,
// and not only for speed: lavapipe ends all loops once an invocation has gone around 65535 times.
void choose_experts(uint token) {
    for (uint i = gl_LocalInvocationID.x; i < p.n_expert; i += gl_WorkGroupSize.x) {
        uint own = key_of(i);
        uint before = 0;
        for (uint first = 0; first < p.n_expert; first += COUNTED) {
            [[unroll]] for (uint v = 0; v < COUNTED; v += 4) {
                uint j = first + v;
                // Of equals the lower index.
                uvec4 is_lower = uvec4(lessThan(uvec4(j, j + 1, j + 2, j + 3), uvec4(i)));
                uvec4 is_before = uvec4(greaterThan(keys[j / 4] + is_lower, uvec4(own)));
                before += (is_before.x + is_before.y) + (is_before.z + is_before.w);
            }
        }
        if (before < p.n_used) {
            chosen[before] = score[i];
            ids[token * p.n_used + before] = i;
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

// Chooses for one token. To be called by the whole workgroup, with a barrier between two tokens: where threads
// look at what others wrote, there is a barrier of it (lavapipe 26.1 never comes back from one of the subgroup
// while other subgroups are elsewhere).
void choose(uint token) {
    bool works = gl_SubgroupID == 0;
    if (works) {
        bool bad = load_logits(token);
        if (gl_SubgroupInvocationID == 0) {
            no_basis = bad;
        }
        if (bad) {
            store_nan(token);
        } else {
            score_experts();
        }
    }
    barrier();
    if (no_basis) {
        return;
    }
    if (p.n_group > 1) {
        if (works) {
            choose_groups();
        }
        barrier();
        if (works) {
            drop_groups();
        }
        barrier();
    }
    choose_experts(token);
    barrier();
    if (works) {
        store_weights(token);
    }
}

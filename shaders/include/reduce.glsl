// Reductions over a whole workgroup, the same on every thread and in a fixed order. A workgroup of one
// subgroup needs no barrier. Needs common.glsl. All threads of the workgroup must call.
const uint REDUCE_SLOTS = 256; // the most subgroups a workgroup can have: 1024 threads by 4
shared uint reduce_slots[REDUCE_SLOTS];

float group_sum(float v) {
    v = subgroupAdd(v);
    if (gl_NumSubgroups == 1) {
        return v;
    }
    barrier(); // earlier readers of the slots
    if (gl_SubgroupInvocationID == 0) {
        reduce_slots[gl_SubgroupID] = floatBitsToUint(v);
    }
    barrier();
    float sum = 0.0;
    for (uint i = 0; i < gl_NumSubgroups; ++i) {
        sum += uintBitsToFloat(reduce_slots[i]);
    }
    return sum;
}

uint group_sum(uint v) {
    v = subgroupAdd(v);
    if (gl_NumSubgroups == 1) {
        return v;
    }
    barrier();
    if (gl_SubgroupInvocationID == 0) {
        reduce_slots[gl_SubgroupID] = v;
    }
    barrier();
    uint sum = 0;
    for (uint i = 0; i < gl_NumSubgroups; ++i) {
        sum += reduce_slots[i];
    }
    return sum;
}

uint group_max(uint v) {
    v = subgroupMax(v);
    if (gl_NumSubgroups == 1) {
        return v;
    }
    barrier();
    if (gl_SubgroupInvocationID == 0) {
        reduce_slots[gl_SubgroupID] = v;
    }
    barrier();
    uint most = 0;
    for (uint i = 0; i < gl_NumSubgroups; ++i) {
        most = max(most, reduce_slots[i]);
    }
    return most;
}

// The best of candidates (key, index): the largest key, of equals the lowest index. Key 0 is none.
uvec2 group_best(uvec2 candidate) {
    uint key = group_max(candidate.x);
    return uvec2(key, ~group_max(candidate.x == key ? ~candidate.y : 0));
}

#include "order_key.glsl"

#version 460
#include "common.glsl"
#include "reduce.glsl"
// The k largest values of each row, descending, of equals the lower index first; k = 1 is argmax. NaN is
// never chosen; places left over get id 0xffffffff and -inf.
// One pass finds the best of each of CHUNKS runs of the row. Then each place takes the best run's best and
// looks through that run alone for the next one.
// Bindings: 0 logits [n_rows][n], 1 ids u32[n_rows][k], 2 values f32[n_rows][k].
// Grid: one item per row.
layout(push_constant, scalar) uniform Push {
    uint n;
    uint n_rows;
    uint k;
} p;
layout(binding = 0, scalar) readonly buffer Logits { float logits[]; };
layout(binding = 1, scalar) writeonly buffer Ids { uint ids[]; };
layout(binding = 2, scalar) writeonly buffer Values { float values[]; };

const uint CHUNKS = 512;
const uvec2 NONE = uvec2(0, 0xffffffffu);
shared uvec2 best_of[CHUNKS]; // order_key, index

bool better(uvec2 a, uvec2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }

// The best of a thread's share of [begin, end) that comes after `last` in the order.
uvec2 scan(uint row, uint begin, uint end, uint first, uint step, uvec2 last) {
    uvec2 best = NONE;
    for (uint i = begin + first; i < end; i += step) {
        uvec2 candidate = uvec2(order_key(logits[row * p.n + i]), i);
        if (candidate.x > best.x && better(last, candidate)) {
            best = candidate;
        }
    }
    return best;
}

void main() {
    uint row = grid_item();
    if (row >= p.n_rows) {
        return;
    }
    uint size = (p.n + CHUNKS - 1) / CHUNKS;
    for (uint c = gl_SubgroupID; c < CHUNKS; c += gl_NumSubgroups) {
        uvec2 best = scan(row, c * size, min((c + 1) * size, p.n), gl_SubgroupInvocationID, gl_SubgroupSize,
            uvec2(0xffffffffu, 0));
        uint top = subgroupMax(best.x);
        uint index = subgroupMin(best.x == top ? best.y : 0xffffffffu);
        if (gl_SubgroupInvocationID == 0) {
            best_of[c] = uvec2(top, index);
        }
    }
    for (uint place = 0; place < p.k; ++place) {
        barrier();
        uvec2 best = NONE;
        for (uint c = gl_LocalInvocationID.x; c < CHUNKS; c += gl_WorkGroupSize.x) {
            best = better(best_of[c], best) ? best_of[c] : best;
        }
        best = group_best(best);
        if (gl_LocalInvocationID.x == 0) {
            ids[row * p.k + place] = best.x == 0 ? 0xffffffffu : best.y;
            values[row * p.k + place] = best.x == 0 ? uintBitsToFloat(0xff800000u) : logits[row * p.n + best.y];
        }
        if (best.x == 0 || place + 1 == p.k) {
            continue; // the same on every thread
        }
        uint c = best.y / size;
        uvec2 next = group_best(
            scan(row, c * size, min((c + 1) * size, p.n), gl_LocalInvocationID.x, gl_WorkGroupSize.x, best));
        if (gl_LocalInvocationID.x == 0) {
            best_of[c] = next;
        }
    }
}
